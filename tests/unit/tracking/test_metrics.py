"""The catalogue: names, families, and the page that is generated from it."""

import re
from pathlib import Path

import pytest
import torch

from rltrain.algorithms.mismatch import k3_by_age, mismatch_metrics
from rltrain.tracking.catalogue import METRICS
from rltrain.tracking.metrics import check_metrics, document, find_metric

ROOT = Path(__file__).parents[3]


def test_the_page_is_current():
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert page == document(), "run: python -m rltrain.tracking.metrics > docs/metrics.md"


def test_every_name_is_area_slash_name_and_stands_once():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    part = r"/([a-z_0-9]+|age_\{age\}|layer_\{layer\}|part_\{part\}|\{stat\}|\{reward_part\})"
    assert all(re.fullmatch(rf"[a-z_0-9]+({part})+", name) for name in names)


def test_a_name_matches_one_entry_only():
    for metric in METRICS:
        name = re.sub(r"\{(age|layer|part)\}", "3", metric.name)
        name = re.sub(r"\{(stat|reward_part)\}", "fish_2", name)
        assert [m for m in METRICS if m.pattern.fullmatch(name)] == [metric]
        assert find_metric(name) is metric


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("polcy/kl", "policy/kl"),
        ("mismatch/k_3", "mismatch/k3"),
        ("routing/overlap/layer_x", "routing/overlap/layer_{layer}"),
        ("routing/overlap/layer_", "routing/overlap/layer_{layer}"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(
        ValueError, match=re.escape(f"{name!r} is not a known metric; the nearest is {nearest!r}")
    ):
        check_metrics({name: 1.0})


@pytest.mark.parametrize("value", ["1", None, True, torch.tensor(1.0)])
def test_a_value_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="policy/loss: expected an int or a float"):
        check_metrics({"policy/loss": value})


def test_what_mismatch_computes_is_in_the_catalogue():
    ones = torch.ones(3, dtype=torch.bool)
    for area in ("mismatch", "mismatch_native"):
        pair, lens = (torch.tensor([-1.0, -2.0, -3.0]),) * 2, torch.tensor([3])
        metrics = mismatch_metrics(*pair, ones, lens, ones, area=area)
        check_metrics(metrics)
        named = {m.name for m in METRICS if m.name.startswith(f"{area}/")}
        assert set(metrics) == named - {"mismatch/k3/age_{age}"}
    by_age = k3_by_age(*pair, ones, lens, torch.tensor([0, 0, 2]))
    check_metrics(by_age)
    assert set(by_age) == {"mismatch/k3/age_0", "mismatch/k3/age_2"}
