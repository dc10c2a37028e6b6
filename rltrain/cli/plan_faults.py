"""Why a run does not fit the machine, and what to change. Pure."""

from typing import TYPE_CHECKING

from rltrain.config import Config
from rltrain.parallel.memory import Term, gib, total
from rltrain.rollout.memory import EngineMemory

if TYPE_CHECKING:
    from rltrain.cli.plan import Machine

NODE = 8
"""GPUs of a node."""
REMEDIES = {
    "parameters": "more policy.parallel.ep, pp or tp",
    "gradients": "more policy.parallel.ep, pp or tp",
    "optimizer": "more policy.parallel.dp: data-parallel ranks share it out",
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
    machine: "Machine",
    *,
    has_critic: bool,
) -> list[str]:
    """One line each; none where the run fits.

    Args:
        policy: what a rank of each pipeline stage holds
        engine: what an engine rank holds, where there are any
    """
    return [
        *_gpu_faults(config, machine, has_critic=has_critic),
        *_policy_faults(policy, _memory_for_policy(config, machine)),
        *(_engine_faults(engine, machine) if engine else []),
    ]


def gpus_needed(config: Config, *, has_critic: bool) -> int:
    ranks = config.policy.parallel.world_size
    own = has_critic and config.critic.placement == "own"
    return ranks * (2 if own else 1) + config.engine_ranks


def _gpu_faults(config: Config, machine: "Machine", *, has_critic: bool) -> list[str]:
    faults, needed = [], gpus_needed(config, has_critic=has_critic)
    shared = _shares_a_gpu(config, machine) and needed == 2
    if machine.gpus is not None and machine.gpus < needed and not shared:
        faults.append(
            f"the run needs {needed} GPUs, there are {machine.gpus}: lower policy.parallel or "
            "rollout.num_engines"
        )
    if config.engine_ranks and config.rollout.tensor_parallel > NODE:
        faults.append(
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}: an engine lies on one node "
            f"of {NODE} GPUs; lower it, or hold the weights in rollout.quantization=fp8"
        )
    return faults


def _shares_a_gpu(config: Config, machine: "Machine") -> bool:
    """One policy rank and one engine on the only GPU there is; see `controller.cluster.place`."""
    return machine.gpus == config.policy.parallel.world_size == config.engine_ranks == 1


def _memory_for_policy(config: Config, machine: "Machine") -> int:
    taken = config.rollout.gpu_memory_utilization if _shares_a_gpu(config, machine) else 0.0
    return int((1 - taken) * machine.memory)


def _policy_faults(policy: list[list[Term]], there: int) -> list[str]:
    faults = []
    for stage, terms in enumerate(policy):
        if (over := total(terms) - there) > 0:
            largest = max((t for t in terms if t.what in REMEDIES), key=lambda t: t.nbytes)
            faults.append(
                f"policy rank of stage {stage}: {gib(over)} too much; most is {largest.what} "
                f"({gib(largest.nbytes)}): {REMEDIES[largest.what]}"
            )
    return faults


def _engine_faults(engine: EngineMemory, machine: "Machine") -> list[str]:
    faults = []
    if engine.sequences < 1:
        faults.append(
            "engine rank: its KV cache holds no sequence of full length; raise "
            "rollout.tensor_parallel or rollout.gpu_memory_utilization"
        )
    if (over := total([*engine.terms, *engine.outside]) - machine.memory) > 0:
        faults.append(f"engine rank: {gib(over)} too much; lower rollout.gpu_memory_utilization")
    return faults
