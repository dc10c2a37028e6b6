"""The processes of one run on one node: all that inherited the run's token from an actor."""

import os
from collections.abc import Iterator
from contextlib import suppress

import psutil

RUN = "RLTRAIN_RUN"
"""Environment variable of an actor's process and its children: the token of the run. Only set where
the run joined a cluster; the processes of others are children of the controller."""
RAYLET = "RAY_RAYLET_PID"
"""Set by Ray. Several nodes may be on one machine, in a test."""
TIMES = 3
"""What a process started before it was killed is found the next time."""


def processes_of(run: str) -> Iterator[psutil.Process]:
    """Those of this node, without this process."""
    raylet = os.environ.get(RAYLET)
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            environment = process.environ() if process.pid != os.getpid() else {}
            if environment.get(RUN) == run and environment.get(RAYLET) == raylet:
                yield process


def end_processes(run: str) -> int:
    """Kill them. Returns how many there were."""
    count = 0
    for _ in range(TIMES):
        for process in list(processes_of(run)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                count += 1
    return count
