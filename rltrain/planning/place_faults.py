"""Why ranks have no place on the nodes, and what to do. Pure."""

from collections.abc import Sequence

from rltrain.config import Config
from rltrain.planning.nodes import Node
from rltrain.planning.rank_count import Mode, arithmetic, count_gpus, critic_ranks_apart


def too_few_gpus(config: Config, nodes: Sequence[Node], modes: Sequence[Mode]) -> str:
    """The error of a run that `place_on_gpus` finds no place for."""
    limit = config.cluster.num_gpus
    free = sum(node.gpus for node in nodes)
    usable = free if limit is None else min(free, limit)
    needed = {mode: count_gpus(config, mode) for mode in modes}
    counts = " or ".join(f"{number} ({mode})" for mode, number in needed.items())
    where = f"cluster.placement={config.cluster.placement}: expected {counts} GPUs"
    if min(needed.values()) > usable:
        capped = f" (cluster.num_gpus={limit})" if limit is not None and limit < free else ""
        found = f"found {usable}{capped}: {arithmetic(config)}. Lower policy.parallel.* or"
        return f"{where}, {found} rollout.num_engines{node_table(nodes)} [RL4001]"
    size = config.rollout.tensor_parallel
    most = max(node.gpus for node in nodes)
    largest = max(node.total_gpus for node in nodes)
    if size > most:
        held = f", of which {most} are free" if most < largest else ""
        return (
            f"rollout.tensor_parallel={size}: an engine lies on one node, where its ranks exchange "
            f"activations at every layer, and the largest node has {largest} GPUs{held}. Lower it, "
            f"or hold the weights in rollout.quantization=fp8{node_table(nodes)} [RL4001]"
        )
    return (
        f"{where}, found {usable}, but not where engines need them: an engine lies on one node and "
        f"takes {size} GPUs there (rollout.tensor_parallel). Lower it, or rollout.num_engines"
        f"{node_table(nodes)} [RL4001]"
    )


def too_few_cpus(config: Config, nodes: Sequence[Node]) -> str:
    """The error of a run that `place_on_cpus` finds no place for."""
    cluster = config.cluster
    ranks = config.policy.parallel.world_size + critic_ranks_apart(config)
    engines = config.rollout.num_engines if config.engine_ranks else 0
    needed = ranks * cluster.cpus_per_rank + engines * cluster.cpus_per_engine
    terms = f"{ranks} ranks x cluster.cpus_per_rank={cluster.cpus_per_rank:g}"
    if engines:
        terms += f" + {engines} engines x cluster.cpus_per_engine={cluster.cpus_per_engine:g}"
    return (
        f"expected {needed:g} free CPUs ({terms}), each rank and each engine on one node; found "
        f"{sum(node.cpus for node in nodes):g} free ones. Lower policy.parallel.*, "
        "rollout.num_engines or cluster.cpus_per_*, or start Ray with more "
        f"(ray start --num-cpus=N){node_table(nodes)} [RL4001]"
    )


def node_table(nodes: Sequence[Node]) -> str:
    """What the nodes have and who holds it; empty for a node alone, of which all is free."""
    if len(nodes) == 1 and not nodes[0].holders and nodes[0].gpus == nodes[0].total_gpus:
        return ""
    rows = [("node", "GPUs", "free", "CPUs", "free", "held by")]
    rows += [
        (
            node.address,
            f"{node.total_gpus}",
            f"{node.gpus}",
            f"{node.total_cpus:g}",
            f"{node.cpus:g}",
            ", ".join(node.holders) or "-",
        )
        for node in nodes
    ]
    widths = [max(len(row[n]) for row in rows) for n in range(5)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]])
        for row in rows
    ]
    return "\n  " + "\n  ".join(lines) + "\n "
