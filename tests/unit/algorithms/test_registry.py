"""Advantages and losses are found by name, or by a dotted path."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from rltrain.algorithms.advantages import ADVANTAGES, find_advantage
from rltrain.algorithms.losses import LOSSES, find_loss
from rltrain.algorithms.losses.ppo import ppo
from rltrain.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig

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


def test_the_page_names_every_part_and_its_corrections_are_valid() -> None:
    page = (Path(__file__).parents[3] / "docs/algorithms.md").read_text(encoding="utf-8")
    fields = AlgorithmConfig.model_fields["aggregation"], KLConfig.model_fields["estimator"]
    choices = [name for field in fields for name in get_args(field.annotation)]
    assert [n for n in [*ADVANTAGES, *LOSSES, *choices] if f"\n| `{n}` |" not in page] == []
    lines = re.findall(r"^\| [\w ]+ \| `(\{.+?\})` \|", page, re.MULTILINE)
    assert len(lines) == 10
    assert all(CorrectionConfig(**yaml.safe_load(line)).active for line in lines)
