"""The Ray actor on each node that has ranks or engines: what must happen on a node happens in it.

The controller calls functions of rltrain's modules through it, and hears from it every second or
two: the new lines of the node's logs come with the answers (`rltrain.actors.log_pieces`). An agent
that has not heard from the controller for long ends the processes of the run on its node, since the
node is cut off from a run that will go on, or end, without it.
"""

import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import ray

from rltrain.actors.actor_log import local_folder, sees_run_folder
from rltrain.actors.host_memory import describe_memory, oom_kills
from rltrain.actors.log_pieces import LogPiece, read_pieces
from rltrain.actors.process_start import begin_process
from rltrain.actors.run_processes import Stopped, end_processes, processes_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
CHECK_S = 1.0
THREADS = 8
"""Calls that an agent works on at once; a heartbeat waits for none of them."""


@dataclass(frozen=True)
class Watched:
    """What an agent needs to know of its run."""

    run: str
    """The token of the run, see `rltrain.actors.run_processes`."""
    logs: str
    """The folder of the logs on the controller's node."""
    silence_s: float
    """How long the controller may be silent before the run is ended on this node."""


class Beat(NamedTuple):
    """What an agent tells the controller."""

    pieces: list[LogPiece]
    taken: dict[str, Any]
    """By name of a source, see `NodeAgent.add_source`."""
    memory: tuple[int, str]
    """See `RunNodes.memory_of`."""


@dataclass
class NodeAgent:
    """Create it as `Agent`.

    Args:
        node: Ray's address of the node
    """

    node: str
    watched: Watched
    _heard: float = math.inf
    """When the controller was heard last; it is waited for from the first time on."""
    _kills_before: int = field(default_factory=oom_kills)
    _sources: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        begin_process()
        # Where the node sees the run's folder, there is nothing to send.
        shared = sees_run_folder(self.watched.logs, self.watched.run)
        self._folder = None if shared else local_folder(self.watched.run)
        threading.Thread(target=self._watch_processes, daemon=True).start()

    def start(self) -> None:
        """Answers when the agent is there."""

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args)`` on this node. It is a function of a module, which the node imports
        from its own rltrain."""
        return function(*args, **kwargs)

    def add_source(self, name: str, make: Callable[..., Callable[[], Any]], *args: Any) -> None:
        """Every beat from now on brings what ``make(*args)``, called here once, returns then."""
        self._sources[name] = make(*args)

    @ray.method(concurrency_group="beat")  # type: ignore[untyped-decorator]
    def beat(self, at: Mapping[str, int]) -> Beat:
        """
        Args:
            at: by log, the bytes that the controller has
        """
        self._heard = time.monotonic()
        pieces = [] if self._folder is None else read_pieces(self._folder, at)
        taken = {name: take() for name, take in self._sources.items()}
        return Beat(pieces, taken, (oom_kills() - self._kills_before, describe_memory()))

    def remove_logs(self) -> None:
        """The controller has all of them."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch_processes(self) -> None:
        stopped = Stopped()
        while (silent := time.monotonic() - self._heard) < self.watched.silence_s:
            time.sleep(CHECK_S)
            for one in stopped.look(processes_of(self.watched.run)):
                sys.stderr.write(f"process {one.pid} was stopped for too long, and was killed\n")
        sys.stderr.write(
            f"{self.node} has heard nothing from the controller for {silent:.0f} s: the processes "
            f"of this run are ended here. Their logs: {self._folder or self.watched.logs}\n"
        )
        sys.stderr.flush()
        end_processes(self.watched.run)
        os._exit(1)


Agent = ray.remote(num_cpus=0, max_concurrency=THREADS, concurrency_groups={"beat": 1})(NodeAgent)
