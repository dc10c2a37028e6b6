"""Advantages and losses are found by name, or by the path to one's own."""

import pytest

from rltrain.algorithms.advantages import ADVANTAGES, find_advantage
from rltrain.algorithms.losses import find_loss
from rltrain.algorithms.losses.ppo import ppo

HERE = "rltrain.algorithms"


def test_a_dotted_path_leads_to_ones_own() -> None:
    assert find_loss(f"{HERE}.losses.ppo.ppo") is ppo is find_loss("ppo")
    assert find_advantage("gae") is ADVANTAGES["gae"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpso", "algorithm.loss=gpso: expected one of ppo, .* the nearest is gspo"),
        (f"{HERE}.losses.ppo.pqo", "expected pqo in a module rltrain.algorithms.losses.ppo"),
        ("nowhere.at.all", "expected all in a module nowhere.at that can be imported"),
        (f"{HERE}.kl.MAX_LOG_RATIO", "expected a function, found float"),
    ],
)
def test_what_is_not_there_is_refused_with_its_name(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_loss(name)


def test_a_function_is_no_entry_of_the_advantages() -> None:
    with pytest.raises(ValueError, match="expected Advantage, found function"):
        find_advantage(f"{HERE}.advantages.gae.gae")
