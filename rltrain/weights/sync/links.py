"""How an engine's worker gets the buckets of each pipeline stage by the transport "broadcast".

It is in the process group of a sender, or it reads its node's memory: that of a sender on the node,
or that of a worker which receives for the node.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from rltrain.parallel.rendezvous import Rendezvous
from rltrain.weights.sync.broadcast import BroadcastGroup
from rltrain.weights.sync.flat_buffers import unpack_bucket
from rltrain.weights.sync.node_memory import NodeMemory, read_node_memory
from rltrain.weights.sync.stream import SLOTS, Bucket


class GroupLink(TypedDict):
    """A sender's process group, as an engine sees it."""

    stage: int
    rendezvous: dict[str, Any]
    """The fields of a `Rendezvous`: vLLM makes dictionaries of what it sends to its workers."""
    ranks: list[int | None]
    """By worker of the engine; None: it is not in the group."""


class EngineLinks(TypedDict):
    """How the workers of one engine get the weights."""

    node: str | None
    shares: bool
    """Whether other workers of the node read what one of them receives."""
    groups: list[GroupLink]
    """In one order for all engines, in which they are joined."""
    start_timeout_s: float
    """Limit of meeting and connecting."""
    timeout_s: float
    """Limit of every later broadcast."""


def join_links(links: EngineLinks, worker: int, device: torch.device) -> "BroadcastReceiver":
    """Join the groups of one worker. Collective with their senders and other members."""
    start_timeout_s, timeout_s = links["start_timeout_s"], links["timeout_s"]
    groups = {
        link["stage"]: BroadcastGroup(
            Rendezvous.from_plain(link["rendezvous"]), rank, device, start_timeout_s, timeout_s
        )
        for link in links["groups"]
        if (rank := link["ranks"][worker]) is not None
    }
    return BroadcastReceiver(
        groups, device, node=links["node"], shares=links["shares"], timeout_s=timeout_s
    )


class BroadcastReceiver:
    """An engine worker's end: member of a group, or reader of its node's memory, for each stage.

    Args:
        groups: by stage
        node: this process's; None: it reads nobody's memory
        shares: whether others of the node read what this process receives
        timeout_s: how long a bucket may take to arrive in the node's memory
    """

    def __init__(
        self,
        groups: Mapping[int, BroadcastGroup],
        device: torch.device,
        *,
        node: str | None = None,
        shares: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self._groups = groups
        self._device = device
        self._node = node
        self._timeout_s = timeout_s
        stages = groups if shares else ()
        self._memory = {stage: [NodeMemory() for _ in range(SLOTS)] for stage in stages}

    @property
    def memory(self) -> dict[int, list[str]]:
        """Where others of the node read what this process receives: paths of slots, by stage."""
        return {stage: [slot.path for slot in slots] for stage, slots in self._memory.items()}

    def read(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket, in memory that nothing else writes.

        Raises:
            ValueError: the bytes are not those that were sent, or do not come here.
        """
        stage, index, nbytes = bucket["stage"], bucket["index"], bucket["payload"]["nbytes"]
        if stage in self._groups:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._groups[stage].broadcast(buffer).wait()
            if self._memory:
                self._memory[stage][index % SLOTS].write(buffer, index)
        else:
            buffer = read_node_memory(self._path(bucket), index, nbytes, self._timeout_s)
        return unpack_bucket(buffer, bucket)

    def _path(self, bucket: Bucket) -> str:
        memory: dict[str, str] = bucket["payload"].get("memory", {})
        if self._node is None or self._node not in memory:
            raise ValueError(
                f"weight sync: expected pipeline stage {bucket['stage']} from its sender or in the "
                f"memory of node {self._node}, found this worker in the groups of stages "
                f"{sorted(self._groups)} and memory on {sorted(memory)}: every engine joins "
                "before the first sync [RL4013]"
            )
        return memory[self._node]

    def leave(self) -> None:
        """Leave all groups, of which other members may have died."""
        for group in self._groups.values():
            group.leave()

    def close(self) -> None:
        """At the end of a sync: give the memory back."""
        for slots in self._memory.values():
            for slot in slots:
                slot.clear()
