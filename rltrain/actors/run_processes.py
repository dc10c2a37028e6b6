"""The processes of one run on one node: all that inherited the run's token from an actor."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

RUN = "RLTRAIN_RUN"
"""Environment variable of an actor's process and its children: the token of the run. Only set where
the run joined a cluster; the processes of others are children of the controller."""
RAYLET = "RAY_RAYLET_PID"
"""Set by Ray. Several nodes may be on one machine, in a test."""
DUMP = signal.SIGUSR1
"""Has an actor write its stacks."""
STOPPED_S = 20.0
TIMES = 3
"""What a process started before it was killed is found the next time."""


Chosen = Callable[[Mapping[str, str]], bool]
"""Whether a process is meant, by its environment."""


def processes_of(run: str) -> Iterator[psutil.Process]:
    """Those of this node, without this process."""
    return processes_with(_of_run(run))


def processes_with(chosen: Chosen) -> Iterator[psutil.Process]:
    """Those of this machine whose environment is ``chosen``, without this process."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.pid != os.getpid() and chosen(process.environ()):
                yield process


def end_processes(run: str) -> int:
    """Kill `processes_of` the run. Returns how many there were."""
    return end_processes_with(_of_run(run))


def end_processes_with(chosen: Chosen) -> int:
    """Kill `processes_with` this, also those that are stopped. Returns how many there were."""
    count = 0
    for _ in range(TIMES):
        for process in list(processes_with(chosen)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                count += 1
    return count


def _of_run(run: str) -> Chosen:
    raylet = os.environ.get(RAYLET)
    return lambda env: env.get(RUN) == run and env.get(RAYLET) == raylet


@dataclass
class Stopped:
    """Kills processes that have been stopped (SIGSTOP) for `STOPPED_S`.

    Whoever waits for one takes it for slow, while a dead one is noticed and replaced."""

    _since: dict[psutil.Process, float] = field(default_factory=dict)

    def look(self, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
        """Look at them, often. Returns those that were killed now."""
        now = time.monotonic()
        stopped = {one for one in processes if _is_stopped(one)}
        self._since = {one: self._since.get(one, now) for one in stopped}
        killed = [one for one, since in self._since.items() if now - since >= STOPPED_S]
        for one in killed:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        return killed


def dump_stacks(processes: Iterable[psutil.Process]) -> None:
    """Have those of them that are prepared for it write where their threads are."""
    for process in processes:
        with suppress(OSError, psutil.Error):
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split(maxsplit=1)[0], 16)
            if caught >> (DUMP - 1) & 1:  # it would end any other process
                process.send_signal(DUMP)


def dump_stacks_of(run: str) -> None:
    """See `dump_stacks`; of the run's processes on this node."""
    dump_stacks(processes_of(run))


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
