"""Hears from the agent of every node while a run goes on, and keeps what their logs bring."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rltrain.actors.failures import NODE_DIED
from rltrain.actors.log_pieces import append_piece
from rltrain.actors.node_agent import Beat
from rltrain.actors.run_processes import dump_stacks_of

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between the answer of a node and the next question."""
TICK_S = 0.2
JOIN_S = 10.0
"""How long the end of a run waits for this thread, which Ray may hold up."""


@dataclass
class _Node:
    agent: Any
    heard: float
    """When it answered last. Times are of `time.monotonic`."""
    at: dict[str, int] = field(default_factory=dict)
    """Bytes that are here, by log."""
    asked: float | None = None
    """When the question that has no answer yet was sent."""
    complete: float = 0.0
    """All that was written before this time is here."""
    memory: tuple[int, str] | None = None
    """See `RunNodes`."""
    lost: str = ""
    """Why nothing more is expected of it."""


class Heartbeat:
    """A thread that asks all agents in turn. It is a `rltrain.actors.run_nodes.RunNodes`.

    Args:
        agents: of the nodes, by address; all have been heard
        logs: the folder for the logs of nodes that do not see it
        silence_s: how long a node may be silent
        run: the token of the run
    """

    def __init__(
        self, agents: Mapping[str, Any], logs: Path, silence_s: float, run: str = ""
    ) -> None:
        now = time.monotonic()
        self._nodes = {address: _Node(agent, now) for address, agent in agents.items()}
        self._logs, self._silence_s, self._run_token = logs, silence_s, run
        self.takers: dict[str, Callable[[str, Any], None]] = {}
        """What becomes of a node's answers, by source (`NodeAgent.add_source`)."""
        self._changed = threading.Condition()
        self._hurry = 0.0  # what was asked before this time is asked again
        self._stopping = False
        self._broken = ""
        self.several = len(agents) > 1
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def lost(self) -> str | None:
        """See `RunNodes`."""
        lost = (node.lost for node in self._nodes.values() if node.lost)
        return self._broken or next(lost, None)

    def lost_nodes(self) -> list[str]:
        return [address for address, node in self._nodes.items() if node.lost]

    def memory_of(self, node: str) -> tuple[int, str] | None:
        """See `RunNodes`."""
        return self._nodes[node].memory if node in self._nodes else None

    def fetch(self, limit_s: float) -> list[str]:
        """See `RunNodes`."""
        with self._changed:
            now = self._hurry = time.monotonic()
            self._changed.notify_all()

            def missing() -> list[str]:
                return [a for a, n in self._nodes.items() if n.complete < now and not n.lost]

            self._changed.wait_for(lambda: not missing() or self._stopping, limit_s)
            return missing()

    def dump_stacks(self) -> None:
        """See `RunNodes`."""
        for node in self._nodes.values():
            if not node.lost:
                node.agent.call.remote(dump_stacks_of, self._run_token)

    def settle(self, nodes: list[str]) -> None:
        """See `RunNodes`."""
        with self._changed:
            now = time.monotonic()
            self._changed.wait_for(
                lambda: all(self._nodes[a].heard > now or self._nodes[a].lost for a in nodes),
                self._silence_s + BEAT_S,
            )

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._ask_until_stopped()
        except Exception as error:  # a run that does not know of its nodes ends
            logger.exception("the nodes are not heard any more")
            self._broken = f"the nodes of the run are not heard any more: {error!r} [RL4020]"

    def _ask_until_stopped(self) -> None:
        waiting: dict[Any, str] = {}
        while not self._stopping:
            for address in self._due():
                waiting[self._nodes[address].agent.beat.remote(self._nodes[address].at)] = address
            refs = list(waiting)
            done = ray.wait(refs, num_returns=len(refs), timeout=TICK_S)[0] if refs else []
            with self._changed:
                for ref in done:
                    self._answered(waiting.pop(ref), ref)
                self._look_for_silent()
                self._changed.notify_all()
                if not waiting:
                    self._changed.wait(TICK_S)

    def _due(self) -> list[str]:
        """The nodes to ask now; they count as asked."""
        now = time.monotonic()
        due = [
            address
            for address, node in self._nodes.items()
            if node.asked is None
            and not node.lost
            and (now - node.heard >= BEAT_S or node.complete < self._hurry)
        ]
        for address in due:
            self._nodes[address].asked = now
        return due

    def _answered(self, address: str, ref: Any) -> None:
        node = self._nodes[address]
        assert node.asked is not None
        asked, node.asked = node.asked, None
        try:
            beat: Beat = ray.get(ref, timeout=BEAT_S)
        except RayActorError as error:
            node.lost = f"node {address} is lost: {_reason(error)} [RL4020]"
            return
        except GetTimeoutError:  # it is silent
            return
        except RayError as error:  # the node answers, though not with what was asked
            logger.warning("node %s: no logs for now: %s", address, error)
            node.heard, node.complete = time.monotonic(), asked
            return
        node.heard, node.memory = time.monotonic(), beat.memory
        if all(piece.left == 0 for piece in beat.pieces):
            node.complete = asked
        try:
            for piece in beat.pieces:
                append_piece(self._logs, piece)
                node.at[piece.name] = node.at.get(piece.name, 0) + len(piece.data)
            for source, taken in beat.taken.items():
                self.takers[source](address, taken)
        except OSError as error:
            logger.warning("what node %s logged cannot be kept: %s", address, error)

    def _look_for_silent(self) -> None:
        now = time.monotonic()
        for address, node in self._nodes.items():
            if node.asked is not None and not node.lost and now - node.heard > self._silence_s:
                node.lost = (
                    f"node {address} is lost: it has not answered for {now - node.heard:.0f} s. "
                    "Its network is cut, or the machine is down or hangs [RL4020]"
                )


def _reason(error: RayActorError) -> str:
    if NODE_DIED in str(error):
        return "Ray says that it has died"
    return "its agent (ray::NodeAgent) has ended"
