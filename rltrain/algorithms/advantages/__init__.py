"""Advantages by name. A new one is a file here and an entry in ``ADVANTAGES`` (docs/extend.md)."""

from rltrain.algorithms.advantages.group import dr_grpo, grpo
from rltrain.algorithms.advantages.inputs import Advantage
from rltrain.algorithms.registry import find

ADVANTAGES = {
    "grpo": Advantage(grpo, compares=True),
    "dr_grpo": Advantage(dr_grpo, compares=True),
}


def find_advantage(name: str) -> Advantage:
    """The advantage ``algorithm.advantage`` names.

    Raises:
        ValueError: see `rltrain.algorithms.registry.find`.
    """
    return find("algorithm.advantage", name, ADVANTAGES, Advantage)
