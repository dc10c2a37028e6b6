"""How many ranks a run has, and how many GPUs they take. Pure."""

from typing import Literal

from rltrain.algorithms.advantages import needs_critic
from rltrain.config import Config

Mode = Literal["disaggregated", "colocated"]


def modes_to_try(config: Config) -> list[Mode]:
    """In the order of preference."""
    wanted = config.cluster.placement
    fits = config.engine_ranks <= config.policy.parallel.world_size
    if wanted == "colocated" and not fits:
        raise ValueError(
            "cluster.placement=colocated: expected at most as many engine ranks as policy ranks, "
            f"found {arithmetic(config)}. Lower rollout.num_engines or rollout.tensor_parallel, "
            "or use cluster.placement=disaggregated"
            " [RL4001]"
        )
    if wanted != "auto":
        return [wanted]
    takes_turns = config.trainer.max_staleness == 0 and config.engine_ranks > 0
    return ["disaggregated", "colocated"] if fits and takes_turns else ["disaggregated"]


def count_gpus(config: Config, mode: Mode) -> int:
    engine_gpus = config.engine_ranks if mode == "disaggregated" else 0
    return config.policy.parallel.world_size + critic_ranks_apart(config) + engine_gpus


def critic_ranks_apart(config: Config) -> int:
    apart = needs_critic(config.algorithm) and config.critic.placement == "own"
    return config.policy.parallel.world_size if apart else 0


def count_ranks(config: Config) -> int:
    """Processes that compute, wherever they do."""
    models = 2 if needs_critic(config.algorithm) else 1
    return models * config.policy.parallel.world_size + config.engine_ranks


def arithmetic(config: Config) -> str:
    """How many ranks there are, and why."""
    layout, rollout = config.policy.parallel, config.rollout
    terms = [
        f"tp*pp*cp*dp = {layout.tp}*{layout.pp}*{layout.cp}*{layout.dp} = {layout.world_size} "
        "policy ranks"
    ]
    if needs_critic(config.algorithm):
        terms.append(f"as many critic ranks (critic.placement={config.critic.placement})")
    if config.engine_ranks:
        terms.append(
            f"num_engines*tensor_parallel = {rollout.num_engines}*{rollout.tensor_parallel} = "
            f"{config.engine_ranks} engine ranks"
        )
    return ", ".join(terms)
