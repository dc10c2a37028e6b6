"""The processes of a run that started its own Ray: Ray's, and all that they started.

Ray waits a minute for its own processes, and then ends this one without a word. So they are watched
here, by every wait of the run (`rltrain.actors.run_nodes`).
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import ray

from rltrain.actors.run_nodes import nodes_known
from rltrain.actors.run_processes import RAYLET, Stopped, dump_stacks, processes_with

logger = logging.getLogger(__name__)

CORE = ("gcs_server", "raylet")
"""Without these of its processes Ray does nothing."""
LOOK_S = 2.0


@dataclass
class LocalProcesses:
    """It is a `rltrain.actors.run_nodes.RunNodes`.

    Args:
        core: Ray's own processes by name
    """

    core: Mapping[str, psutil.Process]
    several: bool = False
    _stopped: Stopped = field(default_factory=Stopped)
    _looked: float = 0.0
    _lost: str | None = None

    def lost(self) -> str | None:
        """See `RunNodes`; what was stopped for long is killed."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            for one in self._stopped.look([*self.core.values(), *self.of_actors()]):
                logger.warning("process %d was stopped for too long, and was killed", one.pid)
        dead = [name for name, process in self.core.items() if not _is_alive(process)]
        if dead and self._lost is None:
            pid = self.core[dead[0]].pid
            self._lost = f"Ray's {dead[0]} (process {pid}) on this machine has died [RL4014]"
        return self._lost

    def of_actors(self) -> Iterator[psutil.Process]:
        return of_raylet(self.core["raylet"].pid)

    def dump_stacks(self) -> None:
        """See `RunNodes`."""
        dump_stacks(self.of_actors())

    def kill_stopped(self) -> None:
        """Before Ray is shut down, which would wait for its own."""
        for process in self.core.values():
            if _is_alive(process) and process.status() == psutil.STATUS_STOPPED:
                process.kill()

    # What only nodes of a cluster have

    def fetch(self, limit_s: float) -> list[str]:
        return []

    def memory_of(self, node: str) -> tuple[int, str] | None:
        return None

    def settle(self, nodes: list[str]) -> None:
        pass


def of_raylet(raylet: int) -> Iterator[psutil.Process]:
    """The actors of the Ray whose raylet this is, and what they started."""
    return processes_with(lambda environment: environment.get(RAYLET) == str(raylet))


def core_processes() -> dict[str, psutil.Process]:
    """Those of the Ray that this process started, by name."""
    started = ray._private.worker._global_node.all_processes  # type: ignore[attr-defined]
    return {name: psutil.Process(started[name][0].process.pid) for name in CORE}


@contextmanager
def watched_ray(core: Mapping[str, psutil.Process]) -> Iterator[None]:
    """Within, every wait for an actor ends when the Ray that this process started has."""
    processes = LocalProcesses(core)
    with nodes_known(processes):
        try:
            yield
        finally:
            processes.kill_stopped()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
