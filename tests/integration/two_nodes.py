"""Two nodes of a Ray cluster on this machine: 127.0.0.2 has the head, 127.0.0.3 sees other files.

The second raylet is in a mount namespace of its own, where that is allowed: the folder of the run
is another one there, as on a machine without a shared disk.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
START_S = 120.0
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Who joins the cluster needs this in its environment, too."""
Process = subprocess.Popen[bytes]


class TwoNodes(NamedTuple):
    address: str
    private: Path
    """A folder that exists on both nodes and is another one on each."""
    packages: Path
    """Of the second node alone, before its other packages."""
    other: Process

    def other_processes(self) -> list[psutil.Process]:
        """Of the second node, the raylet and all that it started."""
        return psutil.Process(self.other.pid).children(recursive=True)

    def overlay(self, package: str, version: str | None) -> None:
        """Have the second node believe that it has this version of a package; None: its own."""
        for old in self.packages.glob(f"{package}-*.dist-info"):
            shutil.rmtree(old)
        if version is not None:
            folder = self.packages / f"{package}-{version}.dist-info"
            folder.mkdir()
            text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            (folder / "METADATA").write_text(text)


def can_unshare() -> bool:
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return done.returncode == 0


@contextmanager
def two_nodes(port: int, source: Path) -> Iterator[TwoNodes]:
    """
    Args:
        source: the folder from which both nodes import rltrain
    """
    if not can_unshare():
        pytest.skip("no mount namespaces here (unshare -m needs root)")
    folder = Path(tempfile.mkdtemp(prefix="rl2-", dir="/tmp"))
    private = folder / "private"
    packages = folder / "packages"
    for made in (private, packages):
        made.mkdir()
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    common = ["--num-cpus=1", "--object-store-memory=200000000"]
    started = []

    def start(name: str, command: Sequence[str], more: Mapping[str, str]) -> Process:
        own = {**os.environ, "RAY_BACKEND_LOG_LEVEL": "warning", **more}
        with (folder / name).open("wb") as log:
            process = subprocess.Popen(
                command, env=own, stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
        _wait_until_started(process, folder / name)
        return process

    try:
        head = ["--head", f"--node-ip-address={HEAD}", f"--port={port}", f"--temp-dir={folder}/r"]
        paths = {"PYTHONPATH": str(source)}
        start("head", [*ray, *common, *head, "--include-dashboard=false"], paths)
        mount = f'mount -t tmpfs tmpfs {private} && exec "$@"'
        join = [f"--address={HEAD}:{port}", f"--node-ip-address={OTHER}"]
        inside = ["unshare", "-m", "bash", "-c", mount, "--"]
        paths = {"PYTHONPATH": f"{packages}{os.pathsep}{source}"}
        other = start("other", [*inside, *ray, *common, *join], paths)
        yield TwoNodes(f"{HEAD}:{port}", private, packages, other)
    finally:
        for process in started:
            _end(process)
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def _wait_until_started(process: Process, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if "Ray runtime started" in log.read_text():
            return
        time.sleep(0.2)
    raise RuntimeError(f"a node did not start: {log.read_text()[-3000:]}")


def _end(process: Process) -> None:
    with suppress(psutil.NoSuchProcess):
        running = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for one in running:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()
