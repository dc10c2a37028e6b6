"""Advantage estimators by name. To add one, add a file here and an entry in ``ADVANTAGES``
(docs/extend.md)."""

from rltrain.algorithms.advantages.advantage_inputs import Advantage
from rltrain.algorithms.advantages.gae import gae
from rltrain.algorithms.advantages.group import dr_grpo, grpo, rloo
from rltrain.algorithms.advantages.reinforce import reinforce_pp, reinforce_pp_baseline
from rltrain.algorithms.lookup import find_by_name
from rltrain.config import Config
from rltrain.config.algorithm import AlgorithmConfig

ADVANTAGES = {
    "grpo": Advantage(grpo, compares=True),
    "dr_grpo": Advantage(dr_grpo, compares=True),
    "rloo": Advantage(rloo, compares=True),
    "reinforce_pp": Advantage(reinforce_pp),
    "reinforce_pp_baseline": Advantage(reinforce_pp_baseline, compares=True),
    "gae": Advantage(gae, needs_values=True),
}


def find_advantage(name: str) -> Advantage:
    """The advantage estimator named by ``algorithm.advantage``.

    Raises:
        ValueError: see `rltrain.algorithms.lookup.find_by_name`.
    """
    return find_by_name("algorithm.advantage", name, ADVANTAGES, Advantage)


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether a run has a critic; raises ``ValueError`` as `find_advantage`."""
    return algorithm.type == "rl" and find_advantage(algorithm.advantage).needs_values


def critic_only_steps(config: Config) -> int:
    """Number of first steps in which only the critic is updated."""
    return config.critic.warmup_steps if needs_critic(config.algorithm) else 0
