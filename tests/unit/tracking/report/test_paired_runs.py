"""Intervals of the difference between two runs: they cover what they should, and claim no more."""

import math
import random

import pytest

from rltrain.tracking.report.paired_runs import (
    block_interval,
    log_ratio,
    mean_difference,
    paired_steps,
    share_difference,
)
from rltrain.tracking.report.series import Series


def _series(values, first=1):
    return Series(list(range(first, first + len(values))), list(values))


def _correlated(noise, count, strength):
    """A stationary first-order autoregression."""
    value, values = noise.gauss(0, 1 / math.sqrt(1 - strength**2)), []
    for _ in range(count):
        value = strength * value + noise.gauss(0, 1)
        values.append(value)
    return values


@pytest.mark.parametrize(("count", "strength"), [(14, 0.0), (40, 0.3), (200, 0.6)])
def test_the_interval_of_equal_runs_contains_zero_nineteen_times_of_twenty(count, strength):
    noise = random.Random(0)
    intervals = [block_interval(_correlated(noise, count, strength)) for _ in range(1000)]
    covered = sum(not interval.excludes_zero for interval in intervals) / 1000
    assert 0.92 < covered < 0.98


def test_a_real_difference_is_found():
    noise = random.Random(0)
    first = _series([noise.gauss(0, 0.1) for _ in range(60)])
    second = Series(first.steps, [value + 0.5 + noise.gauss(0, 0.1) for value in first.values])
    interval = mean_difference(first, second, 1 / 3)
    assert interval.basis == "20 steps in 5 blocks"
    assert interval.low > 0.4 and interval.high < 0.6


def test_only_steps_that_both_have_are_paired():
    first, second = _series([1.0, math.nan, 3.0, 4.0]), _series([10.0, 30.0, 40.0], first=2)
    assert paired_steps(first, second) == [(3.0, 30.0), (4.0, 40.0)]
    assert paired_steps(first, second, 0.5) == [(4.0, 40.0)]


def test_a_few_steps_are_not_judged():
    assert block_interval([1.0] * 9) is None
    assert block_interval([]) is None
    assert log_ratio(_series([0.0] * 30), _series([1.0] * 30)) is None


def test_a_ratio_is_of_logarithms_and_leaves_out_the_first_step():
    first, second = _series([99.0] + [2.0] * 20), _series([1.0] + [4.0] * 20)
    interval = log_ratio(first, second)
    assert math.exp(interval.difference) == pytest.approx(2.0)
    assert interval.half == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("second", "excludes"), [(0.5, False), (0.56, False), (0.57, True), (0.4, True)]
)
def test_accuracies_are_of_the_last_common_evaluation(second, excludes):
    first = Series([0, 10, 20], [0.1, 0.5, 0.9]), Series([0, 10, 20], [512.0] * 3)
    other = Series([0, 10], [0.1, second]), Series([0, 10], [512.0] * 2)
    interval = share_difference(first, other)
    assert interval.basis == "512 problems, step 10"
    assert interval.difference == pytest.approx(second - 0.5)
    assert interval.excludes_zero == excludes


def test_accuracies_without_counted_problems_or_that_are_no_shares_are_not_compared():
    good = Series([0], [0.5]), Series([0], [10.0])
    assert share_difference(good, (Series([0], [0.5]), Series())) is None
    assert share_difference(good, (Series([0], [50.0]), Series([0], [10.0]))) is None
    assert share_difference(good, (Series([0], [math.nan]), Series([0], [10.0]))) is None
