"""The text of ``rltrain plan``: placement, batch identity, memory and its arithmetic."""

from collections.abc import Iterable, Sequence

from rltrain.config import Config
from rltrain.parallel.layer_map import Pipeline
from rltrain.planning import policy_memory as memory
from rltrain.planning.engine_memory import EngineMemory, engine_memory
from rltrain.planning.machine import GpuMachine
from rltrain.planning.memory_terms import GIB, Term, gib, total
from rltrain.planning.nodes import Node
from rltrain.planning.placement import Placement
from rltrain.planning.plan_colocation import generation, host, training, weight_sync
from rltrain.planning.plan_faults import feasible_placement, find_faults
from rltrain.planning.plan_nodes import map_lines, traffic_lines
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.stored_model import owned_parameters, parameter_numel

RESERVE = Term("CUDA, NCCL, allocator", "assumed", 6 * GIB)


def describe_gpus(
    config: Config,
    arch: Architecture,
    machine: GpuMachine,
    note: str,
    *,
    has_critic: bool,
    driver: str | None = None,
) -> tuple[str, bool]:
    """The whole text for a run on GPUs, and whether it fits.

    Args:
        driver: the node that the run is started on, where it is known
    """
    placement = feasible_placement(config, machine)
    several = len(machine.nodes or placement.nodes) > 1
    stages = range(config.policy.parallel.pp)
    policy = [policy_terms(config, arch, stage, has_critic=has_critic) for stage in stages]
    engine = engine_memory(config, arch, machine.memory) if config.engine_ranks else None
    blocks = [
        model_lines(arch, note),
        _placement(config, arch, machine, placement),
        map_lines(config, placement, machine.nodes or ()) if several else [],
        batch_lines(config, arch),
        _policy(config, arch, policy),
        _engine(config, engine) if engine else [],
        _phases(config, policy, engine) if engine and placement.colocated else [],
        traffic_lines(config, arch, placement, driver) if several else [],
    ]
    faults = find_faults(config, policy, engine, machine, placement)
    verdict = [
        f"{'does not fit' if faults else 'fits'}: {gib(machine.memory)} a GPU, "
        f"{gib(max(map(total, policy)))} the fullest policy rank",
        *(f"  {fault}" for fault in faults),
    ]
    text = "\n\n".join("\n".join(block) for block in (*blocks, verdict) if block)
    return f"{text}\n", not faults


def policy_terms(config: Config, arch: Architecture, stage: int, *, has_critic: bool) -> list[Term]:
    """What the GPU of a policy rank of this stage holds, see `policy_memory`."""
    width = 4 if config.policy.precision.params == "fp32" else 2
    terms = memory.states(config, memory.count(config, arch, stage), width)
    if has_critic and config.critic.placement == "shared":
        terms += memory.critic_states(config, arch, stage, width)
    return [
        *terms,
        *max(
            memory.passes(config, arch, stage, width),
            memory.scoring(config, arch, stage, width),
            key=total,
        ),
        RESERVE,
    ]


def model_lines(arch: Architecture, note: str) -> list[str]:
    count = sum(parameter_numel(p) for p in owned_parameters(arch) if p.rule.kind != "buffer")
    experts = f", {arch.num_experts} experts, {arch.experts_per_token} a token"
    return [
        f"model: {arch.family}, {count:,} parameters, {arch.num_layers} layers"
        f"{experts if arch.num_experts else ''}",
        f"  {note}",
    ]


def _placement(
    config: Config, arch: Architecture, machine: GpuMachine, placement: Placement
) -> list[str]:
    p, rollout = config.policy.parallel, config.rollout
    there = "" if machine.nodes is None else f"; there are {_listed(machine.nodes)}"
    lines = [
        "placement",
        f"  policy: tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.dp} = {p.world_size} ranks; experts "
        f"over ep {p.ep} x etp {p.etp}",
        *stage_lines(config, arch),
    ]
    if placement.critic:
        lines.append(f"  critic: {p.world_size} ranks, placement={config.critic.placement}")
    if config.engine_ranks:
        lines.append(
            f"  engines: {rollout.num_engines} x {rollout.tensor_parallel} = "
            f"{config.engine_ranks} ranks"
            + ", alternating with the policy on its GPUs"
            * placement.colocated
        )
    nodes = counted(len(placement.nodes), "node")
    lines.append(f"  GPUs: {placement.num_gpus}, on {nodes}{there}")
    return lines


def _listed(nodes: Sequence[Node]) -> str:
    """``8`` of one node, ``32 on 4`` of four."""
    gpus = sum(node.gpus for node in nodes)
    return f"{gpus}" if len(nodes) == 1 else f"{gpus} on {len(nodes)}"


def stage_lines(config: Config, arch: Architecture) -> list[str]:
    p = config.policy.parallel
    pipeline = Pipeline.of(p)
    lines = []
    for stage in range(p.pp):
        chunks = (pipeline.chunk_layers(arch.num_layers, stage, chunk) for chunk in range(p.vpp))
        spans = ", ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in chunks)
        lines.append(f"    stage {stage}: layers {spans}")
    return lines


def batch_lines(config: Config, arch: Architecture) -> list[str]:
    trainer, p, policy = config.trainer, config.policy.parallel, config.policy
    group = config.algorithm.group_size if config.algorithm.type == "rl" else 1
    update = memory.sequences_per_update(config)
    sequences = trainer.prompts_per_step * group
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lines = [
        "batch",
        f"  {trainer.prompts_per_step} prompts x {group} responses = {sequences} sequences a step "
        f"= {counted(trainer.mini_batches, 'update')} x {update} sequences",
        f"  {update} sequences / dp {p.dp} = {update // p.dp} a data-parallel rank and update, in "
        f"at most {counted(memory.max_micro_batches(config), 'micro-batch')} of at most "
        f"{policy.max_tokens_per_micro_batch:,} tokens",
        f"  at most {sequences:,} x ({config.data.max_prompt_tokens:,} prompt + "
        f"{config.rollout.max_response_tokens:,} response) = {sequences * longest:,} tokens a step",
    ]
    if arch.num_experts and config.routing_replay.capture and config.engine_ranks:
        width = 1 if arch.num_experts <= 256 else 2
        layers, k = len(arch.moe_layers), arch.experts_per_token
        lines.append(
            f"  routes, in host memory: at most {sequences * longest:,} tokens x {layers} layers x "
            f"{k} experts x {width} = {gib(sequences * longest * layers * k * width)} a step"
        )
    return lines


def _policy(config: Config, arch: Architecture, policy: list[list[Term]]) -> list[str]:
    fullest = max(range(len(policy)), key=lambda stage: total(policy[stage]))
    parts = memory.count(config, arch, fullest).parts
    lines = [
        f"memory of a policy rank; stage {fullest} of {len(policy)} is the fullest",
        "  it holds " + ", ".join(f"{part} {n:,}" for part, n in parts.items()),
        *term_lines(policy[fullest]),
    ]
    if len(policy) > 1:
        totals = ", ".join(f"{total(terms) / GIB:.1f}" for terms in policy)
        lines.append(f"  by stage: {totals} GiB")
    return lines


def _engine(config: Config, engine: EngineMemory) -> list[str]:
    lines = ["memory of an engine rank", *term_lines(engine.terms)]
    lines += ["  besides", *term_lines(engine.outside)]
    if engine.sequences < engine.wanted:
        lines.append(
            f"  of {engine.wanted} sequences at once {engine.sequences} can be of full length; "
            "vLLM lets others wait"
        )
    return lines


def _phases(config: Config, policy: list[list[Term]], engine: EngineMemory) -> list[str]:
    phases = [
        generation(engine),
        training(max(policy, key=total)),
        max((weight_sync(stage, engine) for stage in policy), key=lambda term: term.nbytes),
    ]
    return [
        "a GPU that policy and engine share, by phase",
        *map(_line, phases),
        _line(host(config, policy, engine)),
    ]


def term_lines(terms: Iterable[Term]) -> list[str]:
    terms = list(terms)
    return [*map(_line, terms), f"  {total(terms) / GIB:9.3f} GiB"]


def _line(term: Term) -> str:
    return f"  {term.nbytes / GIB:9.3f} GiB  {term.name}: {term.formula}"


def counted(count: int, of: str) -> str:
    plural = "" if count == 1 else "es" if of.endswith("ch") else "s"
    return f"{count:,} {of}{plural}"
