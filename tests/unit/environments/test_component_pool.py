"""Several components in real worker processes: values, failures by name, and what is refused."""

from typing import Any

import pytest

from rltrain.environments.reward_sample import RewardInput
from tests.unit.environments.pool_case import samples

LENGTH: dict[str, Any] = {"function": "sample_rewards.length", "weight": -0.5}
ACTS: dict[str, Any] = {"function": "sample_rewards.act_out", "weight": 2.0}
TAKES: dict[str, Any] = {"function": "sample_rewards.take_out"}


def test_the_reward_is_the_weighted_sum_of_what_each_worker_function_gives(pool_of):
    right = {"function": "exact", "weight": 2}
    with pool_of("exact", components={"right": right, "brief": LENGTH}, num_workers=2) as pool:
        given = [RewardInput(r, r, "4", "?", {}, "id") for r in ("4", "five", *["4"] * 40)]
        results = pool.score(given)
    assert [r.value for r in results] == [1.5, -2.0, *[1.5] * 40]
    assert [r.correct for r in results[:2]] == [True, False]
    assert results[1].parts == {"right": 0.0, "brief": 4.0}


def test_a_failure_names_its_component_and_costs_its_sample_alone(pool_of):
    acts = {"brief": LENGTH, "acts": ACTS}
    bad = ["raise lost", "nan", "exit 3", "hang"]
    with pool_of("exact", components=acts, timeout_s=0.5) as pool:
        results = pool.score(samples(*bad, "is 3"))
    said = [
        "KeyError: 'lost'",
        "ValueError: expected a finite number",
        "its process ended with exit code 3",
    ]
    for result, expected in zip(
        results, [*said, "not done in data.reward.timeout_s"], strict=False
    ):
        assert result.value is None and result.detail.startswith(f"component acts: {expected}")
    assert results[-1].value == 6.0 - 2.0 and results[-1].parts == {"brief": 4.0, "acts": 3.0}


def test_the_limit_is_that_of_each_call(pool_of):
    twice = {"one": ACTS, "two": ACTS}
    with pool_of("exact", components=twice, timeout_s=1.0) as pool:
        results = pool.score(samples("sleep 0.7", "sleep 2"))
    assert [r.value for r in results] == [pytest.approx(4 * 0.7), None]
    assert results[0].seconds > 1.3
    assert results[1].detail.startswith("component one: not done in")


def test_a_component_does_not_see_what_another_took_out_of_an_answer(pool_of):
    with pool_of("exact", components={"one": TAKES, "two": TAKES}) as pool:
        (result,) = pool.score([RewardInput("x", "x", [1, 2], "?", {"tests": [1]}, "id")])
    assert result.parts == {"one": 3.0, "two": 3.0}


def test_a_threshold_of_the_whole_reward_is_compared_with_the_sum(pool_of):
    with pool_of(
        "exact", components={"acts": ACTS, "right": {"function": "exact"}}, success_at=3.0
    ) as pool:
        assert [r.correct for r in pool.score(samples("is 1"))] == [None]
        given = [RewardInput(r, r, "is 1", "?", {}, "id") for r in ("is 1", "is 2", "is 0")]
        results = pool.score(given)
    assert [(r.value, r.correct) for r in results] == [(3.0, True), (4.0, True), (0.0, False)]


@pytest.mark.parametrize(
    ("components", "said"),
    [
        (
            {"a": {"function": "exact"}, "b": {"function": "math_verify"}},
            "a and b all say which responses are correct, .* data.reward.correct_from=a",
        ),
        (
            {"a": LENGTH, "b": {"function": "sample_rewards.lenght"}},
            "data.reward.components.b.function=sample_rewards.lenght: .* has no 'lenght'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_at_start(pool_of, components, said):
    with pytest.raises(ValueError, match=said):
        pool_of("exact", components=components)


def test_a_component_is_chosen_by_name_or_by_its_own_threshold(pool_of):
    both = {"a": {"function": "exact"}, "b": {"function": "exact", "weight": 0.0}}
    with pool_of("exact", components=both, correct_from="b") as pool:
        (result,) = pool.score([RewardInput("x", "x", "x", "?", {}, "id")])
    assert (result.value, result.correct) == (1.0, True)
    with pool_of("exact", components={"brief": LENGTH | {"success_at": 3.0}}) as pool:
        assert [r.correct for r in pool.score(samples("12", "123"))] == [False, True]
