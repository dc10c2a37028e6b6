"""Some hosts with a Ray cluster over them, and runs on it."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rltrain.tracking.jsonl import read_jsonl
from tests.hosts.links import Cable, Quality, bad_cable
from tests.hosts.loopback import LoopbackHost, loopback_host
from tests.hosts.namespaces import Host, host, switch, why_not
from tests.hosts.ray_nodes import free_port, start_ray

Machine = Host | LoopbackHost
RUN = Path("/tmp/run")
"""The run's folder on every host, where it is not shared: each has its own."""


@dataclass(frozen=True)
class Run:
    """A run that was started on a host."""

    process: subprocess.Popen[str]
    log: Path
    folder: Path
    """As this process calls it."""

    def wait(self, expect: int = 0, limit_s: float = 900.0) -> "Run":
        try:
            status = self.process.wait(limit_s)
        finally:
            self.kill()
        assert status == expect, f"exit status {status}, expected {expect}:\n{self.output}"
        return self

    @property
    def output(self) -> str:
        """What the terminal shows."""
        return self.log.read_text()

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """The rows of metrics.jsonl by step."""
        file = self.folder / "metrics.jsonl"
        return {row["step"]: row for row in read_jsonl(file)} if file.exists() else {}

    def wait_for_step(self, step: int, limit_s: float = 900.0) -> None:
        """Until that step is in metrics.jsonl."""
        end = time.monotonic() + limit_s
        while step not in self.metrics:
            assert self.process.poll() is None, f"it ended before step {step}:\n{self.output}"
            assert time.monotonic() < end, f"no step {step} after {limit_s:g} s:\n{self.output}"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@dataclass(frozen=True)
class Stage:
    """The hosts: the first has Ray's head and the driver."""

    hosts: Sequence[Machine]
    cables: Sequence[Cable]
    """Of the hosts; none where they are not real."""
    shared: Path
    """A folder that all hosts can write, under one path."""
    logs: Path
    """Of this process: what the terminals show."""
    address: str = ""
    """Of the Ray cluster."""
    why_not: str = ""
    """Why the hosts are not real; "" if they are."""
    cable_is: str = "good"
    runs: list[Run] = field(default_factory=list)

    def describe(self) -> str:
        """What the hosts are."""
        if self.why_not:
            return f"raylets on 127.0.0.x, since no hosts can be made here: {self.why_not}"
        return f"network namespaces; the last cable: {self.cable_is}"

    def start(self, *arguments: str, on: int = 0, folder: Path = RUN, **env: str) -> Run:
        """``python -m rltrain.main`` on a host."""
        machine = self.hosts[on]
        found = folder if self.shared in folder.parents else machine.path(folder)
        where = folder if isinstance(machine, Host) else found
        log = self.logs / f"run-{len(self.runs)}.log"
        argv = [sys.executable, "-m", "rltrain.main", *arguments, f"trainer.output_dir={where}"]
        with log.open("w") as file:
            process = machine.start(argv, file, **env)
        self.runs.append(Run(process, log, found))
        return self.runs[-1]


@contextmanager
def stage(
    folder: Path,
    cpus: Sequence[int] = (0, 3, 3),
    *,
    bad: Quality | None = None,
    shm_mib: int = 8192,
    ray: bool = True,
) -> Iterator[Stage]:
    """One host for each of ``cpus``, with a raylet that offers so many, unless ``ray`` is false.

    Args:
        folder: for files of this process, and for the folder that all hosts share
        bad: the quality of the last host's cable
        shm_mib: size of each /dev/shm, which takes memory only where it is used
    """
    logs, shared = folder / "logs", folder / "shared"
    logs.mkdir(parents=True)
    shared.mkdir()
    reason = why_not()
    numbers = range(1, len(cpus) + 1)
    with ExitStack() as stack:
        hosts: list[Any]
        cables: list[Cable] = []
        cable_is = "good"
        if reason:
            # Ray's sockets lie there, and their paths have to be short.
            short = Path(stack.enter_context(TemporaryDirectory(prefix="rl-")))
            hosts = [stack.enter_context(loopback_host(n, short)) for n in numbers]
        else:
            network = stack.enter_context(switch())
            hosts = [
                stack.enter_context(host(network, n, shared, shm_mib=shm_mib)) for n in numbers
            ]
            cables = [Cable(network, f"h{n}") for n in numbers]
            if bad is not None:
                cable_is = stack.enter_context(bad_cable(hosts[-1], cables[-1], bad))
        port = free_port(hosts[0].address) if reason else 6379
        address = start_ray(hosts, cpus, port) if ray else ""
        ready = Stage(hosts, cables, shared, logs, address, reason, cable_is)
        try:
            yield ready
        finally:
            for run in ready.runs:
                run.kill()
            _keep_ray_logs(ready)


def _keep_ray_logs(made: Stage) -> None:
    """They end with the hosts, and tell why something failed."""
    for machine in made.hosts:
        temporary = machine.environment.get("RAY_TMPDIR")
        ray = Path(temporary) / "ray" if temporary else machine.path("/tmp/ray")
        for session in ray.glob("session_2*"):
            if not session.is_symlink():
                target = made.logs / machine.name
                shutil.copytree(session / "logs", target, symlinks=True, dirs_exist_ok=True)
