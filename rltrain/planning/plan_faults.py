"""Why a run does not fit the machine, and what to change. Pure."""

from rltrain.config import Config
from rltrain.planning.engine_memory import EngineMemory
from rltrain.planning.machine import GpuMachine
from rltrain.planning.memory_terms import Term, gib, total
from rltrain.planning.nodes import planned_nodes
from rltrain.planning.place import place_on_gpus
from rltrain.planning.placement import Placement
from rltrain.planning.plan_colocation import OFFLOADED_POLICY, SLEEPING_ENGINE, weight_sync
from rltrain.planning.rank_count import count_gpus, modes_to_try

REMEDIES = {
    "parameters": "more policy.parallel.ep, pp or tp",
    "gradients": "more policy.parallel.ep, pp or tp",
    "optimizer": "more policy.parallel.dp: data-parallel ranks shard it",
    "reference": "algorithm.kl.coef=0, or more policy.parallel.ep, pp or tp",
    "activations": "policy.recompute=full, fewer policy.max_tokens_per_micro_batch, more tp or cp",
    "a layer at work": "fewer policy.max_tokens_per_micro_batch, more tp or cp",
    "logits": "fewer policy.max_tokens_per_micro_batch, or more policy.parallel.tp or cp",
    "gradient of the head": "more policy.parallel.tp",
}


def find_faults(
    config: Config,
    policy: list[list[Term]],
    engine: EngineMemory | None,
    machine: GpuMachine,
    placement: Placement,
) -> list[str]:
    """One line per fault; none where the run fits.

    Args:
        policy: what a rank of each pipeline stage holds
        engine: what an engine rank holds, where there are any
    """
    if engine is None or not placement.colocated:
        return [
            *_gpu_faults(config, machine),
            *_policy_faults(policy, machine.memory),
            *(_engine_faults(engine, machine.memory) if engine else []),
        ]
    return [
        *_gpu_faults(config, machine),
        *_policy_faults(policy, machine.memory - SLEEPING_ENGINE),
        *_engine_faults(engine, machine.memory - OFFLOADED_POLICY),
        *_sync_faults(policy, engine, machine.memory),
    ]


def feasible_placement(config: Config, machine: GpuMachine) -> Placement:
    """Where ranks go on the machine, or would on one with enough GPUs.

    Raises:
        ValueError: no number of GPUs is enough.
    """
    if machine.nodes is not None and not _too_few(config, machine):
        return place_on_gpus(config, machine.nodes)
    unlimited = config.cluster.model_copy(update={"num_gpus": None})
    # A machine with room for all, and a node for each engine.
    size = max(machine.per_node, config.rollout.tensor_parallel)
    room = size * (count_gpus(config, modes_to_try(config)[0]) + config.rollout.num_engines)
    free = config.model_copy(update={"cluster": unlimited})
    return place_on_gpus(free, planned_nodes(room, size))


def _too_few(config: Config, machine: GpuMachine) -> str:
    """The reason, where there are too few GPUs."""
    if machine.nodes is None:
        return ""
    try:
        place_on_gpus(config, machine.nodes)
    except ValueError as error:
        return str(error)
    return ""


def _gpu_faults(config: Config, machine: GpuMachine) -> list[str]:
    if fault := _too_few(config, machine):
        return [fault]
    size = config.rollout.tensor_parallel
    if machine.nodes is None and config.engine_ranks and size > machine.per_node:
        return [
            f"rollout.tensor_parallel={size}: an engine lies on one node of {machine.per_node} "
            "GPUs; lower it, or hold the weights in rollout.quantization=fp8"
        ]
    return []


def _policy_faults(policy: list[list[Term]], gpu_memory: int) -> list[str]:
    faults = []
    for stage, terms in enumerate(policy):
        if (over := total(terms) - gpu_memory) > 0:
            largest = max((t for t in terms if t.name in REMEDIES), key=lambda t: t.nbytes)
            faults.append(
                f"policy rank of stage {stage}: {gib(over)} too much; most is {largest.name} "
                f"({gib(largest.nbytes)}): {REMEDIES[largest.name]}"
            )
    return faults


def _engine_faults(engine: EngineMemory, gpu_memory: int) -> list[str]:
    faults = []
    if engine.sequences < 1:
        faults.append(
            "engine rank: its KV cache holds no sequence of full length; raise "
            "rollout.tensor_parallel or rollout.gpu_memory_utilization"
        )
    if (over := total([*engine.terms, *engine.outside]) - gpu_memory) > 0:
        faults.append(f"engine rank: {gib(over)} too much; lower rollout.gpu_memory_utilization")
    return faults


def _sync_faults(policy: list[list[Term]], engine: EngineMemory, gpu_memory: int) -> list[str]:
    over = max(weight_sync(stage, engine).nbytes for stage in policy) - gpu_memory
    if over <= 0:
        return []
    return [
        f"weight sync: {gib(over)} too much, when the weights of policy and engine are on one GPU; "
        "more policy.parallel.ep, pp or tp, more rollout.tensor_parallel, or "
        "cluster.placement=disaggregated"
    ]
