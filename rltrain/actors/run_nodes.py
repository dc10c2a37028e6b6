"""What the waits of the controller need to know of a run's nodes; nothing in a run on one machine.

`rltrain.controller.cluster.heartbeat` hears from the nodes. It stands here for as long as the run
has nodes, so that every wait for an actor can ask it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

DUMP_S = 1.0
CAUSE_S = 5.0
"""How long a failure waits for the last lines of the logs on other nodes."""


class RunNodes(Protocol):
    several: bool
    """Whether actors of the run are on more than one node."""

    def lost(self) -> str | None:
        """A sentence about the first node that was lost; None while all answer."""

    def fetch(self, limit_s: float) -> list[str]:
        """Bring all that the logs have now. Returns the nodes that did not answer within the
        limit; those lost before are not waited for."""

    def memory_of(self, node: str) -> tuple[int, str] | None:
        """How many processes the kernel has killed there for lack of memory, and its memory in
        words; None where that is not known."""

    def dump_stacks(self) -> None:
        """Have every actor write to its log where its threads are."""

    def settle(self, nodes: list[str]) -> None:
        """Wait until each of the nodes has answered or is lost."""


_current: list[RunNodes] = []


@contextmanager
def nodes_known(nodes: RunNodes) -> Iterator[None]:
    """Within, every wait for an actor ends when one of the nodes is lost."""
    _current.append(nodes)
    try:
        yield
    finally:
        _current.remove(nodes)


def several_nodes() -> bool:
    return any(nodes.several for nodes in _current)


def lost_node() -> str | None:
    """See `RunNodes.lost`."""
    return next((text for nodes in _current if (text := nodes.lost())), None)


def memory_of(node: str | None) -> tuple[int, str] | None:
    """See `RunNodes.memory_of`; None also in a run on one machine."""
    known = (nodes.memory_of(node) for nodes in _current if node is not None)
    return next((memory for memory in known if memory is not None), None)


def dump_stacks() -> None:
    """See `RunNodes.dump_stacks`; a second later they are there."""
    for nodes in _current:
        nodes.dump_stacks()
    time.sleep(DUMP_S if _current else 0.0)


def fetch_logs() -> None:
    """Have what the logs of all nodes say now, before a failure is put into words.

    An error on one node may follow from the loss of another, which is known only after a while. So
    a node that is silent now is waited for until it answers or is lost.
    """
    for nodes in _current:
        nodes.settle(nodes.fetch(CAUSE_S))
