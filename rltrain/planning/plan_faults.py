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

NODE = 8
"""GPUs of a node."""
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
    if machine.gpus is not None and not _too_few(config, machine):
        return place_on_gpus(config, planned_nodes(machine.gpus, NODE))
    mode = modes_to_try(config)[0]
    enough = max(NODE, config.rollout.tensor_parallel) * count_gpus(config, mode)
    free = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"num_gpus": None})}
    )
    return place_on_gpus(free, planned_nodes(enough, max(NODE, config.rollout.tensor_parallel)))


def _too_few(config: Config, machine: GpuMachine) -> str:
    """The arithmetic, where there are too few GPUs."""
    if machine.gpus is None:
        return ""
    try:
        place_on_gpus(config, planned_nodes(machine.gpus, NODE))
    except ValueError as error:
        return str(error)
    return ""


def _gpu_faults(config: Config, machine: GpuMachine) -> list[str]:
    faults = [fault] if (fault := _too_few(config, machine)) else []
    if config.engine_ranks and config.rollout.tensor_parallel > NODE:
        faults.append(
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}: an engine lies on one node "
            f"of {NODE} GPUs; lower it, or hold the weights in rollout.quantization=fp8"
        )
    return faults


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
