"""What stands in for hosts where no namespaces can be made: raylets on 127.0.0.x.

They share network, processes, disk and /dev/shm, so it proves less; `Stage.why_not` says so.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tests.hosts.namespaces import host_environment

MARK = "RLTRAIN_LOOPBACK_HOST"
"""Set in the environment of all that runs on a host: so its processes are known."""


@dataclass(frozen=True)
class LoopbackHost:
    """As `namespaces.Host`."""

    name: str
    address: str
    environment: Mapping[str, str]
    interface: str = "lo"

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def path(self, path: str | Path) -> Path:
        """Its /tmp is a folder of this machine's."""
        return Path(str(path).replace("/tmp", self.environment["TMPDIR"], 1))

    def processes(self) -> dict[int, str]:
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.environment[MARK]:
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def kill_all(self) -> None:
        for _ in range(3):  # what they started in the meantime, too
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def start(self, argv: Sequence[str], output: IO[str], **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(argv),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**self.environment, **env},
            text=True,
            start_new_session=True,
        )


@contextmanager
def loopback_host(number: int, folder: Path) -> Iterator[LoopbackHost]:
    """Host ``number``, counted from 1; its files are below ``folder``."""
    own = os.getpid()
    address = f"127.{10 + own % 200}.{own // 200 % 250}.{number}"
    home = folder / f"host-{number}"
    (home / "home").mkdir(parents=True)
    mark = {MARK: f"{own}-{number}", "TMPDIR": str(home), "HOME": str(home / "home")}
    mark["RAY_TMPDIR"] = str(folder)
    host = LoopbackHost(f"host-{'abcdefgh'[number - 1]}", address, host_environment() | mark)
    try:
        yield host
    finally:
        host.kill_all()
