"""What a run on the CPU of one machine needs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rltrain.actors.host_memory import memory_limit
from rltrain.config import Config
from rltrain.planning import policy_memory as memory
from rltrain.planning.engine_memory import engine_memory
from rltrain.planning.machine import RANKS_PER_CORE, count_cores
from rltrain.planning.memory_terms import GIB, Term, gib, total
from rltrain.planning.nodes import Node
from rltrain.planning.place import place_on_cpus
from rltrain.planning.plan_nodes import map_lines, traffic_lines
from rltrain.planning.plan_text import batch_lines, counted, model_lines, stage_lines, term_lines
from rltrain.planning.rank_count import arithmetic, count_ranks
from rltrain.weights.architecture.decoder import Architecture

WORKER = Term("Python, torch, Megatron", "assumed", GIB)
ENGINE = Term("Python, torch, vLLM: two processes", "assumed", 2 * GIB)
CONTROLLER = Term("controller, Ray and its object store", "assumed", 2 * GIB)


@dataclass(frozen=True)
class Host:
    cores: int
    memory: int
    """Bytes: those of the container, where it has a limit."""

    @classmethod
    def this(cls) -> Self:
        return cls(count_cores(), memory_limit())


def describe_cpu(
    config: Config,
    arch: Architecture,
    host: Host,
    note: str,
    *,
    has_critic: bool,
    nodes: Sequence[Node] | None = None,
    driver: str | None = None,
) -> tuple[str, bool]:
    """The whole text for a run on CPUs, and whether it fits.

    Args:
        host: this machine
        nodes: those of a cluster; None: the run is on this machine alone
        driver: the node that the run is started on, where it is known
    """
    if nodes is not None:
        return _on_nodes(config, arch, nodes, note, driver, has_critic=has_critic)
    blocks, parts = _memory(config, arch, has_critic=has_critic)
    faults = _faults(config, parts, host)
    verdict = f"{'does not fit' if faults else 'fits'}: {gib(total(parts))} of {gib(host.memory)}"
    blocks = [
        model_lines(arch, note),
        _placement(config, arch, host),
        batch_lines(config, arch),
        *blocks,
        ["memory of the machine", *term_lines(parts)],
        [verdict, *(f"  {fault}" for fault in faults)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n", not faults


def _on_nodes(
    config: Config,
    arch: Architecture,
    nodes: Sequence[Node],
    note: str,
    driver: str | None,
    *,
    has_critic: bool,
) -> tuple[str, bool]:
    """Of a run on the CPUs of a cluster. What memory its nodes have is not known."""
    blocks, parts = _memory(config, arch, has_critic=has_critic)
    blocks += [["memory of all nodes", *term_lines(parts)]]
    where = ["placement: by the CPUs that Ray counts on its nodes", *_layout(config, arch)]
    try:
        placed = place_on_cpus(config, nodes)
    except ValueError as error:
        found, moved, verdict = [], [], ["does not fit", f"  {error}"]
    else:
        found = map_lines(config, placed, nodes)
        moved = traffic_lines(config, arch, placed, driver)
        verdict = [f"fits the CPUs of {counted(len(placed.nodes), 'node')}"]
    blocks = [
        model_lines(arch, note),
        where,
        found,
        batch_lines(config, arch),
        *blocks,
        moved,
        verdict,
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n", bool(found)


def _memory(
    config: Config, arch: Architecture, *, has_critic: bool
) -> tuple[list[list[str]], list[Term]]:
    """What a rank of each kind holds, in lines, and what all ranks together do."""
    layout = config.policy.parallel
    stages = range(layout.pp)
    groups = {"policy rank": [_policy(config, arch, stage) for stage in stages]}
    if has_critic:
        groups["critic rank"] = [_critic(config, arch, stage) for stage in stages]
    ranks_per_stage = layout.world_size // layout.pp
    parts = [
        Term(
            counted(ranks_per_stage * layout.pp, name),
            f"stages of {', '.join(gib(total(terms)) for terms in stages_of)}",
            ranks_per_stage * sum(map(total, stages_of)),
        )
        for name, stages_of in groups.items()
    ]
    blocks = []
    for name, stages_of in groups.items():
        fullest = max(stages_of, key=total)
        blocks.append([f"memory of a {name}, the fullest", *term_lines(fullest)])
    if config.engine_ranks:
        engine = _engine(config, arch)
        formula = f"{gib(total(engine))} each"
        parts.append(
            Term(
                counted(config.engine_ranks, "engine rank"),
                formula,
                config.engine_ranks * total(engine),
            )
        )
        blocks.append(["memory of an engine rank", *term_lines(engine)])
    return blocks, [*parts, CONTROLLER]


def _placement(config: Config, arch: Architecture, host: Host) -> list[str]:
    return [
        "placement: on the CPU of this machine; for GPUs, add --gpus N or cluster.device=cuda",
        *_layout(config, arch),
        f"  {counted(count_ranks(config), 'rank')} in all share {counted(host.cores, 'core')}",
    ]


def _layout(config: Config, arch: Architecture) -> list[str]:
    p = config.policy.parallel
    return [
        f"  policy: tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.dp} = {p.world_size} ranks; experts "
        f"over ep {p.ep} x etp {p.etp}",
        *stage_lines(config, arch),
    ]


def _policy(config: Config, arch: Architecture, stage: int) -> list[Term]:
    width = _width(config)
    states = memory.states(config, memory.count(config, arch, stage), width)
    return [*states, *_passes(config, arch, stage), WORKER]


def _critic(config: Config, arch: Architecture, stage: int) -> list[Term]:
    states = memory.critic_states(config, arch, stage, _width(config))
    passes = _passes(config, arch, stage)
    return [*states, *(term for term in passes if term.name != "routes"), WORKER]


def _passes(config: Config, arch: Architecture, stage: int) -> list[Term]:
    width = _width(config)
    update = memory.passes(config, arch, stage, width)
    return max(update, memory.scoring(config, arch, stage, width), key=total)


def _width(config: Config) -> int:
    """Bytes of a parameter: on a CPU ``auto`` is fp32."""
    return 2 if config.policy.precision.params == "bf16" else 4


def _engine(config: Config, arch: Architecture) -> list[Term]:
    *used, _ = engine_memory(config, arch, 0).terms  # the KV cache of a card
    cache = config.rollout.kv_cache_gib
    return [*used, Term("KV cache", f"rollout.kv_cache_gib={cache:g}", int(cache * GIB)), ENGINE]


def _faults(config: Config, parts: Sequence[Term], host: Host) -> list[str]:
    faults = []
    if (over := total(parts) - host.memory) > 0:
        largest = max(parts, key=lambda part: part.nbytes)
        faults.append(
            f"{gib(over)} too much; most is {largest.name} ({gib(largest.nbytes)}): a smaller "
            "model, fewer ranks, fewer policy.max_tokens_per_micro_batch, or GPUs"
        )
    if (ranks := count_ranks(config)) > RANKS_PER_CORE * host.cores:
        faults.append(
            f"{ranks} ranks on {counted(host.cores, 'core')}, at most {RANKS_PER_CORE} a core: "
            f"{arithmetic(config)}. Lower policy.parallel.* or rollout.num_engines"
        )
    return faults
