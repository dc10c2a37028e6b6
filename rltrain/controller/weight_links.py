"""Connect the policy ranks that send weights with the engines' workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from rltrain.config.rollout import Transport
from rltrain.controller.cluster.engines import Engines
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.rendezvous import rendezvous_file
from rltrain.weights.sync.broadcast import SenderLink
from rltrain.weights.sync.links import EngineLinks, GroupLink
from rltrain.weights.sync.stage_plan import EngineWorker, StageSender, plan_senders
from rltrain.weights.sync.stream import SLOTS, Bucket

NodeMemory = dict[tuple[int, str], list[str]]
"""Paths of slots, by stage and node."""


class SyncNodes(NamedTuple):
    """Addresses of the nodes of policy ranks, and of engines."""

    policy: Sequence[str]
    engines: Sequence[str]


@dataclass(frozen=True)
class Connection:
    """Who takes part in a weight sync."""

    receivers: list[str]
    """`device_name` of every engine worker."""
    streams: Sequence[Sequence[int]]
    """The policy ranks of each stream."""
    crossings: Sequence[int]
    """How often the bytes of each stream go from one node to another."""
    memory: NodeMemory = field(default_factory=dict)
    """Where one worker of a node receives for all of them."""

    def with_memory(self, bucket: Bucket) -> Bucket:
        """The bucket, which also says where the workers of each node find it."""
        slot, payload = bucket["index"] % SLOTS, bucket["payload"]
        memory = {
            node: slots[slot]
            for (stage, node), slots in self.memory.items()
            if stage == bucket["stage"]
        }
        return {**bucket, "payload": {**payload, "memory": payload["memory"] | memory}}


def connect(
    policy: PolicyGroup, engines: Engines, transport: Transport, nodes: SyncNodes
) -> Connection:
    """Raises ``ValueError``: an engine worker's GPU has no policy rank, for transport "ipc"."""
    devices = engines.devices()
    receivers = [device for engine in devices for device in engine]
    if transport == "ipc":
        check_shared(receivers, policy.device_names())
        everyone = list(chain.from_iterable(policy.stages))
        return Connection(receivers, [everyone], [pipeline_crossings(policy.stages, nodes.policy)])
    senders = plan_senders(
        policy.stages,
        nodes.policy,
        nodes.engines,
        [len(engine) for engine in devices],
        shares_memory=receivers[0] == "cpu",
    )
    memory = _join(policy, engines, senders, nodes.engines, [len(engine) for engine in devices])
    crossings = [
        sum(sender.num_remote for sender in senders if sender.stage == stage)
        for stage in range(len(policy.stages))
    ]
    return Connection(receivers, policy.stages, crossings, memory)


def check_shared(receivers: Sequence[str], senders: Sequence[str]) -> None:
    if alone := sorted(set(receivers) - set(senders)):
        raise ValueError(
            f"rollout.weight_transfer=ipc: expected a policy rank on the GPU of every engine "
            f"worker, found none on {alone}: use rollout.weight_transfer=broadcast"
            " [RL4010]"
        )


def pipeline_crossings(stages: Sequence[Sequence[int]], nodes: Sequence[str]) -> int:
    """How often a tensor goes from one node to another when its stage broadcasts it to the others.

    Args:
        stages: ranks of each pipeline stage; ranks in the same place of it form a group
        nodes: by rank
    """
    groups = zip(*stages, strict=True)
    return sum(len({nodes[rank] for rank in group}) - 1 for group in groups)


def _join(
    policy: PolicyGroup,
    engines: Engines,
    senders: Sequence[StageSender],
    nodes: Sequence[str],
    sizes: Sequence[int],
) -> NodeMemory:
    """Have senders and receivers meet."""
    files = [str(rendezvous_file(engines)) if s.receivers else None for s in senders]
    links = [
        engine_links(senders, files, engine, nodes, sizes, engines.timeout_s)
        for engine in range(len(sizes))
    ]
    wait_until_joined = engines.join_senders(links)
    policy.join_receivers(
        {
            sender.rank: SenderLink(
                file, len(sender.receivers) + 1, sender.node if sender.shares else None
            )
            for sender, file in zip(senders, files, strict=True)
        }
    )
    return {
        (stage, node): slots
        for node, workers in zip(nodes, wait_until_joined(), strict=True)
        for memory in workers
        for stage, slots in memory.items()
    }


def engine_links(
    senders: Sequence[StageSender],
    files: Sequence[str | None],
    engine: int,
    nodes: Sequence[str],
    sizes: Sequence[int],
    timeout_s: float,
) -> EngineLinks:
    """The part of one engine.

    Args:
        files: of the process group of each sender
        nodes: by engine
        sizes: workers, by engine
    """
    groups = []
    for sender, file in zip(senders, files, strict=True):
        ranks = {worker: rank for rank, worker in enumerate(sender.receivers, start=1)}
        own = [ranks.get(EngineWorker(engine, worker)) for worker in range(sizes[engine])]
        if file is not None and any(own):
            group = GroupLink(stage=sender.stage, file=file, size=len(ranks) + 1, ranks=own)
            groups.append(group)
    neighbours = sum(size for node, size in zip(nodes, sizes, strict=True) if node == nodes[engine])
    return EngineLinks(
        node=nodes[engine], shares=neighbours > 1, groups=groups, timeout_s=timeout_s
    )
