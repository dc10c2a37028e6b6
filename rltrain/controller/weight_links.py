"""Connect the policy ranks that send weights with the engines' workers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import NamedTuple

from rltrain.actors.failures import AwaitedCall, get_all
from rltrain.config.rollout import Transport
from rltrain.controller.cluster.engines import Engines
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.parallel.rendezvous import Member, Rendezvous
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
    meetings = [
        policy.meet(group_members(sender, nodes)) if sender.receivers else None
        for sender in senders
    ]
    limits = engines.start_timeout_s, engines.timeout_s
    links = [
        engine_links(senders, meetings, engine, nodes, sizes, limits)
        for engine in range(len(sizes))
    ]
    # All are waited for at once: where one cannot join, the others wait for it in vain.
    joining = engines.join_senders(links) + policy.join_receivers(
        {
            sender.rank: SenderLink(meeting, sender.node if sender.shares else None)
            for sender, meeting in zip(senders, meetings, strict=True)
        }
    )
    call = AwaitedCall("weights", "connect", "cluster.start_timeout_s")
    joined = get_all(joining, call, engines.start_timeout_s)
    return {
        (stage, node): slots
        for node, workers in zip(nodes, joined[: len(sizes)], strict=True)
        for memory in workers
        for stage, slots in memory.items()
    }


def group_members(sender: StageSender, nodes: Sequence[str]) -> list[Member]:
    """Of the process group of a sender, by rank.

    Args:
        nodes: by engine
    """
    return [
        Member(f"policy rank {sender.rank}", sender.node),
        *(
            Member(f"engine {engine}, worker {worker},", nodes[engine])
            for engine, worker in sender.receivers
        ),
    ]


def engine_links(
    senders: Sequence[StageSender],
    meetings: Sequence[Rendezvous | None],
    engine: int,
    nodes: Sequence[str],
    sizes: Sequence[int],
    limits: tuple[float, float],
) -> EngineLinks:
    """The part of one engine.

    Args:
        meetings: of the process group of each sender
        nodes: by engine
        sizes: workers, by engine
        limits: ``start_timeout_s`` and ``timeout_s``
    """
    groups = []
    for sender, meeting in zip(senders, meetings, strict=True):
        ranks = {worker: rank for rank, worker in enumerate(sender.receivers, start=1)}
        own = [ranks.get(EngineWorker(engine, worker)) for worker in range(sizes[engine])]
        if meeting is not None and any(own):
            group = GroupLink(stage=sender.stage, rendezvous=asdict(meeting), ranks=own)
            groups.append(group)
    neighbours = sum(size for node, size in zip(nodes, sizes, strict=True) if node == nodes[engine])
    start_timeout_s, timeout_s = limits
    return EngineLinks(
        node=nodes[engine],
        shares=neighbours > 1,
        groups=groups,
        start_timeout_s=start_timeout_s,
        timeout_s=timeout_s,
    )
