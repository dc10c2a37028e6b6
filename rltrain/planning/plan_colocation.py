"""What a GPU that policy and engine share holds in each phase, and what the host holds. Pure.

See `rltrain.controller.cluster.colocation`.
"""

from collections.abc import Sequence

from rltrain.config import Config
from rltrain.planning.engine_memory import OUTSIDE, EngineMemory
from rltrain.planning.memory_terms import GIB, Term, gib, total

SLEEPING_ENGINE = OUTSIDE
"""What a sleeping engine keeps on the GPU: CUDA and NCCL. Assumed."""
OFFLOADED_POLICY = 3 * GIB
"""What a policy rank keeps on the GPU when all its parts are offloaded. Assumed."""
OFFLOADED = ("parameters", "optimizer", "reference")
"""What is offloaded to the host. Gradients are dropped: each update starts from zero."""


def generation(engine: EngineMemory) -> Term:
    used = total([*engine.terms, *engine.outside])
    formula = f"engine {gib(used)} + offloaded policy rank {gib(OFFLOADED_POLICY)} (assumed)"
    return Term("generation", formula, used + OFFLOADED_POLICY)


def training(policy: Sequence[Term]) -> Term:
    used = total(policy)
    formula = f"policy rank {gib(used)} + engine asleep {gib(SLEEPING_ENGINE)} (assumed)"
    return Term("training", formula, used + SLEEPING_ENGINE)


def weight_sync(policy: Sequence[Term], engine: EngineMemory) -> Term:
    """The one phase in which the weights of both are on the GPU."""
    parameters = total(term for term in policy if term.name == "parameters")
    weights, outside = _weights(engine), total(engine.outside)
    formula = (
        f"policy's parameters {gib(parameters)} + engine's weights {gib(weights)} + its "
        f"{' and '.join(term.name for term in engine.outside)} {gib(outside)} + "
        f"the rest of the policy rank {gib(OFFLOADED_POLICY)} (assumed)"
    )
    return Term("weight sync", formula, parameters + weights + outside + OFFLOADED_POLICY)


def host(config: Config, policy: Sequence[Sequence[Term]], engine: EngineMemory) -> Term:
    """Of all ranks together.

    Args:
        policy: of a rank of each pipeline stage
    """
    ranks = config.policy.parallel.world_size
    offloaded = [
        t for stage in policy for t in stage if t.name.removeprefix("critic's ") in OFFLOADED
    ]
    names = dict.fromkeys(term.name for term in offloaded)
    formula = f"{', '.join(names)} of {ranks} policy ranks"
    kept = 0
    if config.trainer.sync_every > 1:  # between syncs engines keep the weights they have
        kept = config.engine_ranks * _weights(engine)
        formula += f", weights of {config.engine_ranks} engine ranks"
    return Term("offloaded to the host", formula, ranks // len(policy) * total(offloaded) + kept)


def _weights(engine: EngineMemory) -> int:
    return total(term for term in engine.terms if "weights" in term.name)
