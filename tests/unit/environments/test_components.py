"""The weighted sum of components, and which of them says what is correct."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.environments.components import Component, correct_component, weighted_sum
from rltrain.environments.rewards import LARGEST, Judgement

NAMES = st.sampled_from(["a", "b", "c", "right", "brief"])
NUMBERS = st.floats(-1e6, 1e6)
TERMS = st.dictionaries(NAMES, st.tuples(NUMBERS, NUMBERS), min_size=1)


def component(name: str, weight: float = 1.0, success_at: float | None = None) -> Component:
    return Component(name, lambda *_: 0.0, weight, success_at)


def said(reward: float, correct: bool | None = None, **parts: float) -> Judgement:
    return Judgement(reward, correct, parts)


@given(TERMS)
def test_the_reward_is_the_weighted_sum_and_each_value_a_part(
    terms: Mapping[str, tuple[float, float]],
) -> None:
    components = [component(name, weight) for name, (weight, _) in terms.items()]
    judged = {name: said(value) for name, (_, value) in terms.items()}
    total = weighted_sum(components, judged, None)
    assert total.reward == math.fsum(weight * value for weight, value in terms.values())
    assert total.parts == {name: value for name, (_, value) in terms.items()}
    assert total.correct is None
    assert weighted_sum(components[::-1], judged, None).reward == total.reward  # bit for bit


@given(TERMS, st.data())
def test_a_failed_component_is_named_and_is_no_zero(
    terms: Mapping[str, tuple[float, float]], data: st.DataObject
) -> None:
    failed = data.draw(st.sampled_from(sorted(terms)))
    components = [component(name, weight) for name, (weight, _) in terms.items()]
    judged = {n: f"{n} is lost" if n == failed else said(v) for n, (_, v) in terms.items()}
    with pytest.raises(ValueError, match=f"^component {failed}: {failed} is lost$"):
        weighted_sum(components, judged, None)


def test_all_failed_components_are_named() -> None:
    with pytest.raises(ValueError, match=r"component a: x; component b: y"):
        weighted_sum([component("a"), component("b")], {"a": "x", "b": "y"}, None)


def test_a_components_own_parts_have_its_name_before_theirs() -> None:
    judged = {"a": said(1, tags=0.5), "b": said(2)}
    parts = weighted_sum([component("a"), component("b")], judged, None).parts
    assert parts == {"a": 1, "a_tags": 0.5, "b": 2}
    with pytest.raises(ValueError, match=r"component a: its part b would be logged as a_b, as ano"):
        weighted_sum([component("a"), component("a_b")], {"a": said(1, b=2), "a_b": said(3)}, None)


@pytest.mark.parametrize(
    ("terms", "found"),
    [
        ({"a": (1e30, 1e30)}, r"component a: 1e\+30 \* 1e\+30: float32 cannot hold it"),
        ({"a": (1e300, 1e30)}, "component a: "),
        ({"a": (1, LARGEST), "b": (1, LARGEST)}, "the weighted sum of the components is 6.8"),
    ],
)
def test_what_float32_cannot_hold_is_no_reward(terms: dict[str, Any], found: str) -> None:
    components = [component(name, weight) for name, (weight, _) in terms.items()]
    with pytest.raises(ValueError, match=found):
        weighted_sum(components, {n: said(v) for n, (_, v) in terms.items()}, None)


@pytest.mark.parametrize(
    ("chosen", "threshold", "judged", "correct"),
    [
        ("a", 0.5, said(0.5), True),
        ("a", 0.5, said(0.4), False),
        ("a", 0.5, said(0.4, True), True),  # what it says counts before its threshold
        ("a", None, said(0.4, False), False),
        ("a", None, said(0.4), None),
    ],
)
def test_the_chosen_component_says_what_is_correct(
    chosen: str, threshold: float | None, judged: Judgement, correct: bool | None
) -> None:
    components = [component("b", 5), component("a", -2, threshold)]
    total = weighted_sum(components, {"a": judged, "b": said(9, True)}, chosen)
    assert total.correct is correct


def test_a_verdict_that_nobody_asked_for_is_no_silent_accuracy() -> None:
    judged = {"a": said(1), "b": said(1, True)}
    components = [component("a"), component("b")]
    with pytest.raises(ValueError, match=r"set data.reward.correct_from=b \[RL2011\]"):
        weighted_sum(components, judged, None)
    assert weighted_sum(components, judged, None, asks_whole=True).correct is None


def test_the_only_component_with_a_threshold_is_chosen() -> None:
    one = [component("a"), component("b", success_at=1.0)]
    assert correct_component(one, None) == "b"
    assert correct_component(one, "a") == "a"
    assert correct_component([component("a")], None) is None
    with pytest.raises(ValueError, match=r"b and c all say .* data.reward.correct_from=b \[RL2009"):
        correct_component([*one, component("c", success_at=0.0)], None)
