"""Decide on which node and GPU every rank of a run computes. Pure: it knows no Ray.

A block of ranks that holds whole groups of tp, cp and ep stays on one node while it fits there;
pipeline stages and data-parallel copies may be on others. An engine is on one node.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rltrain.algorithms.advantages import needs_critic
from rltrain.config import Config
from rltrain.planning.nodes import LOCAL, Node, Slot
from rltrain.planning.packing import Counts, Demand, pack
from rltrain.planning.place_faults import too_few_cpus, too_few_gpus
from rltrain.planning.placement import Placement
from rltrain.planning.rank_count import Mode, count_gpus, critic_ranks_apart, modes_to_try
from rltrain.planning.rank_order import block_sizes, order_ranks

PER_CPU = 10_000
"""Ray counts CPUs in ten thousandths."""


def place(config: Config, nodes: Sequence[Node]) -> Placement:
    """Decide where every rank goes.

    Args:
        nodes: of the cluster, in the order in which they are used

    Raises:
        ValueError: as `place_on_gpus` and `place_on_cpus`.
    """
    device = config.cluster.device
    if device == "cpu" or (device == "auto" and not any(node.total_gpus for node in nodes)):
        return place_on_cpus(config, nodes)
    return place_on_gpus(config, nodes)


def place_locally(config: Config, num_gpus: int, node: str = LOCAL) -> Placement:
    """Decide where every rank goes in a run that starts its own Ray.

    On a CPU all share the cores.

    Raises:
        ValueError: as `place_on_gpus`.
    """
    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and num_gpus == 0):
        return on_one_cpu(config, node)
    return place_on_gpus(config, [Node(node, gpus=num_gpus, total_gpus=num_gpus)])


def on_one_cpu(config: Config, node: str = LOCAL) -> Placement:
    """All ranks on the cores of one node, which nobody counts."""
    here, rollout = Slot(node), config.rollout
    ranks = (here,) * config.policy.parallel.world_size
    critic = ranks if needs_critic(config.algorithm) else ()
    engines = ((here,) * rollout.tensor_parallel,) * rollout.num_engines
    return Placement("cpu", (node,), ranks, critic, engines if config.engine_ranks else ())


def place_on_gpus(config: Config, nodes: Sequence[Node]) -> Placement:
    """Decide where every rank goes on the free GPUs of these nodes.

    Policy and critic ranks of one number share a GPU, or the critic has GPUs of its own. Engines
    have GPUs of their own (disaggregated) or those of policy ranks of one node (colocated).

    Raises:
        ValueError: there are not enough, or no node has enough for an engine.
    """
    modes, limit = modes_to_try(config), config.cluster.num_gpus
    allowed = [mode for mode in modes if limit is None or count_gpus(config, mode) <= limit]
    for sizes in block_sizes(config.policy.parallel):
        for mode in allowed:
            if placed := _pack_gpus(config, nodes, sizes, mode):
                return placed
    raise ValueError(too_few_gpus(config, nodes, modes))


def place_on_cpus(config: Config, nodes: Sequence[Node]) -> Placement:
    """Decide where every rank goes by the CPUs that these nodes have free.

    Raises:
        ValueError: there are not enough, or no node has enough for an engine.
    """
    rank, engine = (
        round(PER_CPU * n) for n in (config.cluster.cpus_per_rank, config.cluster.cpus_per_engine)
    )
    free = [round(PER_CPU * node.cpus) for node in nodes]
    for sizes in block_sizes(config.policy.parallel):
        for size in sizes:
            demand = _demand(config, size * rank, size, engine, "disaggregated")
            if counts := pack(free, demand):
                return _placed(config, nodes, counts, size, "cpu", "disaggregated")
    raise ValueError(too_few_cpus(config, nodes))


def _pack_gpus(
    config: Config, nodes: Sequence[Node], sizes: Sequence[int], mode: Mode
) -> Placement | None:
    free = [node.gpus for node in nodes]
    for size in sizes:
        demand = _demand(config, size, size, config.rollout.tensor_parallel, mode)
        if counts := pack(free, demand):
            return _placed(config, nodes, counts, size, "cuda", mode)
    return None


def _demand(config: Config, block: int, ranks: int, engine: int, mode: Mode) -> Demand:
    """Of blocks of ``ranks`` ranks, each as large as ``block``."""
    return Demand(
        block=block,
        policy=config.policy.parallel.world_size // ranks,
        critic=critic_ranks_apart(config) // ranks,
        engine=engine,
        engines=config.rollout.num_engines if config.engine_ranks else 0,
        shared=mode == "colocated",
    )


def _placed(
    config: Config,
    nodes: Sequence[Node],
    counts: Counts,
    size: int,
    device: Literal["cpu", "cuda"],
    mode: Mode,
) -> Placement:
    """Ranks and engines in their order on the nodes that take so many blocks of ``size``."""
    kept = [s for sizes in block_sizes(config.policy.parallel) for s in sizes if s % size == 0]
    used: Counter[int] = Counter()

    def take(node: int) -> Slot:
        used[node] += 1
        return Slot(nodes[node].address, used[node] - 1 if device == "cuda" else None)

    def ranks(blocks: list[int]) -> tuple[Slot, ...]:
        return tuple(take(node) for node in order_ranks([n * size for n in blocks], kept))

    policy = ranks(counts.policy)
    critic = ranks(counts.critic) if any(counts.critic) else policy
    engines = []
    for node, count in enumerate(counts.engines):
        shared = iter([slot for slot in policy if slot.node == nodes[node].address])
        for _ in range(count * config.rollout.tensor_parallel):
            engines.append(next(shared) if mode == "colocated" else take(node))
    width = config.rollout.tensor_parallel
    cut = tuple(tuple(engines[n : n + width]) for n in range(0, len(engines), width))
    here = {slot.node for slot in (*policy, *critic, *engines)}
    return Placement(
        device,
        tuple(node.address for node in nodes if node.address in here),
        policy,
        critic if needs_critic(config.algorithm) else (),
        cut,
    )
