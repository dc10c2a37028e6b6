"""A process that ends and removes what a run left on this machine, however the run has ended.

It reads lines of JSON on its standard input, whose other end the run holds: that closes when the
run's process ends, also by SIGKILL. Ray's own processes end with the run's; an actor that is
stopped, what an engine started, and Ray's agents may not.
"""

import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rltrain.actors.kept_logs import Sweep, copy_ray_logs, redact_logs
from rltrain.actors.outcome import KILLED, is_locked, write_killed
from rltrain.actors.run_processes import RAYLET, Chosen, end_processes_with, processes_with
from rltrain.actors.run_temp import RunTemp
from rltrain.actors.shared_memory import mapped_by, remove
from rltrain.config.redact import Redactor, remember_secrets

logger = logging.getLogger(__name__)

END_S = 30.0
TRACKER = "multiprocessing.resource_tracker"
TRACKERS_S = 3.0
SWEEP_S = 10.0
"""How often the logs of actors are searched for secrets."""


class Guardian:
    """The guardian of this process's Ray.

    Args:
        temp: the run's temporary folder, which it removes
        run_dir: the run's folder, where it leaves Ray's logs and, of a run that was killed,
            outcome.json; None: there is none
    """

    def __init__(self, temp: RunTemp, run_dir: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run
        )
        self.tell(temp=str(temp.root), run_dir=run_dir and str(run_dir))

    def tell(self, **told: Any) -> None:
        """What `Told` has."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it; the run goes on
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Once Ray was shut down: returns when nothing is left of it."""
        assert self._process.stdin is not None
        self.tell(closed=True)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %d still removes what the run left", self._process.pid)


@dataclass
class Told:
    """What the run has said of itself."""

    temp: str | None = None
    run_dir: str | None = None
    raylet: int | None = None
    """The process of the raylet that the run started; None where it joined a cluster."""
    shared: list[str] = field(default_factory=list)
    """In /dev/shm."""
    secrets: list[str] = field(default_factory=list)
    closed: bool = False
    """It came to its own end."""
    agents: list[psutil.Process] = field(default_factory=list)
    """Found when the raylet is told: later their environment cannot be read."""

    def take(self, line: bytes) -> None:
        for name, value in json.loads(line).items():
            setattr(self, name, value)
        remember_secrets(self.secrets)
        if self.raylet is not None and not self.agents:
            with suppress(psutil.NoSuchProcess):
                self.agents = psutil.Process(self.raylet).children()


def listen(told: Told) -> None:
    """Until the run's process has closed its end."""
    left, sweep, swept = b"", None, time.monotonic()
    while True:
        if select.select([0], [], [], SWEEP_S)[0]:
            data = os.read(0, 2**16)
            if not data:
                return
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                told.take(line)
        if told.run_dir and time.monotonic() - swept >= SWEEP_S:
            sweep = sweep or Sweep(Path(told.run_dir) / "logs")
            sweep.sweep(Redactor())
            swept = time.monotonic()


def clean_up(told: Told, began: float) -> None:
    """
    Args:
        began: when the run did, in seconds since 1970
    """
    assert told.temp is not None
    temp = RunTemp(Path(told.temp))

    def is_meant(environment: Any) -> bool:
        own = told.raylet is not None and environment.get(RAYLET) == str(told.raylet)
        # Children of a run that came to its end, such as a tracker's, end by themselves.
        return own or (not told.closed and environment.get("TMPDIR") == str(temp.files))

    shared = mapped_by(processes_with(is_meant))
    for agent in told.agents:
        with suppress(psutil.NoSuchProcess):
            agent.kill()
    let_trackers_end(is_meant)
    end_processes_with(is_meant)
    remove(shared.union(told.shared), temp.root.name)
    try:
        if told.run_dir is not None and Path(told.run_dir).is_dir():
            leave_in(Path(told.run_dir), told, temp, began)
    finally:
        shutil.rmtree(temp.root, ignore_errors=True)


def let_trackers_end(is_meant: Chosen) -> None:
    """Kill all processes but Python's resource trackers, which then remove what these had in
    /dev/shm, and end."""
    for process in processes_with(is_meant):
        with suppress(psutil.Error):
            if TRACKER not in " ".join(process.cmdline()):
                process.kill()
    psutil.wait_procs(list(processes_with(is_meant)), timeout=TRACKERS_S)


def leave_in(run_dir: Path, told: Told, temp: RunTemp, began: float) -> None:
    """What the run's folder keeps; the outcome first, since the disk may be full."""
    if not told.closed and is_locked(run_dir):
        return  # another run has it by now
    if not told.closed and write_killed(run_dir, began):
        # Nobody else can say so: not even Ray does, which ends a process that needs a dead raylet.
        with suppress(OSError):  # a terminal that is gone
            sys.stderr.write(f"rltrain: {run_dir}: {KILLED}\n")
    redactor = Redactor()
    try:
        copy_ray_logs(temp.ray, run_dir, redactor)
    except OSError as error:  # a full disk: the run has said so
        sys.stderr.write(f"rltrain: Ray's logs were not all kept in {run_dir}: {error}\n")
    if told.closed or told.raylet is not None:  # else actors on other nodes may still write
        redact_logs(run_dir / "logs", redactor)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    began, told = time.time(), Told()
    listen(told)
    clean_up(told, began)


if __name__ == "__main__":
    main()
