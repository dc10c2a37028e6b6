"""Which policy ranks send the weights, and to whom, with the transport "broadcast". Pure.

Every pipeline stage has senders of its own, so no rank collects the whole model. A node that has
engines and a rank of the stage gets the stage's bytes from that rank. All other nodes get them from
one sender of the stage, once each. So the bytes between nodes are the fewest possible.

On CPUs one worker of each such node receives; the others of the node read its memory. On GPUs all
workers are in the sender's group: NCCL itself crosses the network once per node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class EngineWorker(NamedTuple):
    """A process of an engine."""

    engine: int
    worker: int


@dataclass(frozen=True)
class StageSender:
    """A policy rank that sends the tensors of its pipeline stage."""

    stage: int
    rank: int
    node: str
    served: tuple[str, ...]
    """Nodes whose engines get the bytes from it."""
    receivers: tuple[EngineWorker, ...]
    """Ranks 1, 2 and so on of its process group, whose rank 0 it is; there is none if empty."""
    shares: bool
    """Whether workers on its node read its memory."""

    @property
    def num_remote(self) -> int:
        """How often its bytes leave its node."""
        return len([node for node in self.served if node != self.node])


def plan_senders(
    stages: Sequence[Sequence[int]],
    policy_nodes: Sequence[str],
    engine_nodes: Sequence[str],
    engine_sizes: Sequence[int],
    *,
    shares_memory: bool,
) -> list[StageSender]:
    """The senders of all stages, in the order of stages.

    Args:
        stages: the policy ranks of each pipeline stage
        policy_nodes: by rank
        engine_nodes: by engine
        engine_sizes: workers, by engine
        shares_memory: whether the workers of a node read one another's memory (CPUs)
    """
    workers: dict[str, list[EngineWorker]] = {}
    for engine, (node, size) in enumerate(zip(engine_nodes, engine_sizes, strict=True)):
        workers.setdefault(node, []).extend(EngineWorker(engine, n) for n in range(size))
    return [
        sender
        for stage, ranks in enumerate(stages)
        for sender in _senders(stage, ranks, policy_nodes, workers, shares_memory)
    ]


def _senders(
    stage: int,
    ranks: Sequence[int],
    policy_nodes: Sequence[str],
    workers: dict[str, list[EngineWorker]],
    shares_memory: bool,
) -> list[StageSender]:
    first = {policy_nodes[rank]: rank for rank in reversed(ranks)}
    near = [node for node in workers if node in first]
    far = [node for node in workers if node not in first]
    senders: list[StageSender] = []
    for node in near or [policy_nodes[ranks[0]]]:
        served = tuple(near and [node]) + tuple(far if not senders else ())
        reached = [
            workers[to][:1] if shares_memory else workers[to]
            for to in served
            if to != node or not shares_memory
        ]
        receivers = tuple(worker for group in reached for worker in group)
        shares = shares_memory and node in served
        senders.append(StageSender(stage, first[node], node, served, receivers, shares))
    return senders
