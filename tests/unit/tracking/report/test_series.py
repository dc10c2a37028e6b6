"""Series are read, thinned, smoothed, searched for spikes and packed without losing a value."""

import base64
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.tracking.report.series import (
    PackedSeries,
    Series,
    binned,
    pack,
    pack_steps,
    read_series,
    smoothed,
    spikes,
    thinned,
)

FLOATS = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=60)


def _unpacked(packed):
    first, distances = packed
    if first is None:
        return np.frombuffer(base64.b64decode(distances), "<f4").tolist()
    return (first + np.cumsum([0, *np.frombuffer(base64.b64decode(distances), "<u2")])).tolist()


def test_a_metric_has_the_steps_at_which_it_was_logged():
    rows = [{"step": 1, "a": 0.5}, {"step": 2, "b": None}, {"step": 4, "a": 0.7, "b": 1.0}]
    series = read_series(rows)
    assert series["a"] == Series([1, 4], [0.5, 0.7])
    assert series["b"].steps == [2, 4] and math.isnan(series["b"].values[0])
    assert series["b"].finite == [1.0]


@given(FLOATS, st.integers(4, 30))
def test_thinning_keeps_both_ends_and_the_extremes(values, points):
    series = Series(list(range(len(values))), values)
    drawn = thinned(series, points)
    assert len(drawn.steps) <= max(points, 4)
    assert (drawn.steps[0], drawn.steps[-1]) == (0, len(values) - 1)
    assert drawn.steps == sorted(set(drawn.steps))
    if series.finite:
        assert (min(drawn.finite), max(drawn.finite)) == (min(series.finite), max(series.finite))


def test_a_mean_leaves_out_what_is_not_finite():
    assert smoothed(Series([1, 2, 3], [1.0, math.nan, 3.0]), window=3).values == [1.0, 2.0, 3.0]
    assert math.isnan(smoothed(Series([1, 2, 3], [math.nan] * 3), window=3).values[1])


@pytest.mark.parametrize("height", [40.0, 1e4])
def test_one_spike_of_a_noisy_metric_is_found_wherever_it_is(height):
    noise = random.Random(0)
    for place in (0, 17, 199):
        values = [noise.lognormvariate(-9, 0.4) for _ in range(200)]
        values[place] *= height
        assert spikes(Series(list(range(200)), values)) == [place]


def test_noise_a_trend_a_drop_and_a_gap_are_no_spikes():
    noise = random.Random(1)
    trend = [math.exp(i / 40) * noise.lognormvariate(0, 0.1) for i in range(200)]
    trend[50], trend[60] = math.nan, 1e-9
    assert spikes(Series(list(range(200)), trend)) == []


def test_a_spike_of_a_constant_metric_and_of_one_with_zeros_is_found():
    constant = [2.0] * 30
    constant[7] = 3.0
    assert spikes(Series(list(range(30)), constant)) == [7]
    signed = [math.sin(i) for i in range(60)]
    signed[40] = 9.0
    assert spikes(Series(list(range(60)), signed)) == [40]
    assert spikes(Series(list(range(30)), [0.0] * 30)) == []


def test_few_values_have_no_spikes():
    assert spikes(Series(list(range(6)), [1, 1, 1, 1, 1, 1e9])) == []


def test_bins_are_means_and_empty_ones_are_nan():
    series = Series([1, 2, 3, 7], [1.0, 3.0, math.nan, 5.0])
    means = binned(series, first=1, width=2, count=4)
    assert means[0] == 2.0 and means[3] == 5.0
    assert math.isnan(means[1]) and math.isnan(means[2])


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30, unique=True))
def test_steps_are_the_same_after_packing(steps):
    assert _unpacked(pack_steps(sorted(steps))) == sorted(steps)


def test_seconds_are_packed_as_floats():
    assert pack_steps([0.0, 1.25])[0] is None
    assert _unpacked(pack_steps([0.0, 1.25])) == [0, 1.25]


def test_values_beyond_float32_are_infinite_and_nan_stays():
    values = np.frombuffer(base64.b64decode(pack([1e300, math.nan, 0.5])), "<f4")
    assert math.isinf(values[0]) and math.isnan(values[1]) and values[2] == 0.5


def test_series_of_the_same_steps_share_them():
    packed = PackedSeries()
    packed.add("a", Series([1, 2, 3], [1.0, 2.0, 3.0]), 10)
    packed.add("b", Series([1, 2, 3], [4.0, 5.0, 6.0]), 10)
    packed.add("c", Series([1, 3], [4.0, 5.0]), 10)
    assert len(packed.steps) == 2
    assert [entry[0] for entry in packed.series.values()] == [0, 0, 1]
