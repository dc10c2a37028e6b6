"""What lies on a GPU that policy and engine share, in each turn, and on the host meanwhile. Pure.

See `rltrain.controller.cluster.colocation`.
"""

from collections.abc import Sequence

from rltrain.config import Config
from rltrain.planning.engine_memory import OUTSIDE, EngineMemory
from rltrain.planning.memory_terms import GIB, Term, gib, total

ASLEEP = OUTSIDE
"""What an engine keeps on the GPU when it sleeps: CUDA and NCCL. Assumed, as is the next."""
AWAY = 3 * GIB
"""What a policy rank keeps when all its parts are away."""
STAYS = ("parameters", "optimizer", "reference")
"""What waits on the host; gradients start from zero anyway."""


def generation(engine: EngineMemory) -> Term:
    used = total([*engine.terms, *engine.outside])
    how = f"engine {gib(used)} + policy rank that is away {gib(AWAY)} (assumed)"
    return Term("generation", how, used + AWAY)


def training(policy: Sequence[Term]) -> Term:
    used = total(policy)
    how = f"policy rank {gib(used)} + engine asleep {gib(ASLEEP)} (assumed)"
    return Term("training", how, used + ASLEEP)


def weight_sync(policy: Sequence[Term], engine: EngineMemory) -> Term:
    """The one time that both sides' weights are there."""
    parameters = total(term for term in policy if term.name == "parameters")
    weights, outside = _weights(engine), total(engine.outside)
    how = (
        f"policy's parameters {gib(parameters)} + engine's weights {gib(weights)} + its "
        f"{' and '.join(term.name for term in engine.outside)} {gib(outside)} + "
        f"the rest of the policy rank {gib(AWAY)} (assumed)"
    )
    return Term("weight sync", how, parameters + weights + outside + AWAY)


def host(config: Config, policy: Sequence[Sequence[Term]], engine: EngineMemory) -> Term:
    """Of all ranks together.

    Args:
        policy: of a rank of each pipeline stage
    """
    ranks = config.policy.parallel.world_size
    stays = [t for stage in policy for t in stage if t.name.removeprefix("critic's ") in STAYS]
    names = dict.fromkeys(term.name for term in stays)
    how = f"{', '.join(names)} of {ranks} policy ranks"
    kept = 0
    if config.trainer.sync_every > 1:  # between syncs engines keep the weights they have
        kept = config.engine_ranks * _weights(engine)
        how += f", weights of {config.engine_ranks} engine ranks"
    return Term("waiting on the host", how, ranks // len(policy) * total(stays) + kept)


def _weights(engine: EngineMemory) -> int:
    return total(term for term in engine.terms if "weights" in term.name)
