"""Ticks and the geometry of the charts."""

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.tracking.charts import (
    HEIGHT,
    WIDE,
    WIDTH,
    Line,
    heatmap,
    line_chart,
    linear_ticks,
    log_ticks,
    stacked_bars,
)

VALUES = st.floats(-1e6, 1e6, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-6)


@given(VALUES, VALUES)
@example(1e6, 999999.9999999999)
def test_linear_ticks_hold_the_range_in_few_even_steps(a, b):
    low, high = min(a, b), max(a, b)
    ticks = linear_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-6)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 8
    assert all(y > x for x, y in itertools.pairwise(ticks))


@given(st.floats(1e-12, 1e6), st.floats(1e-12, 1e6))
def test_log_ticks_hold_the_range(a, b):
    low, high = min(a, b), max(a, b)
    ticks = log_ticks(low, high)
    assert ticks[0] <= low * 1.001
    assert ticks[-1] >= high * 0.999
    assert 2 <= len(ticks) <= 8


def test_ticks_are_round():
    assert linear_ticks(0.03, 0.97) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert log_ticks(2e-5, 3e-4) == pytest.approx([1e-5, 1e-4, 1e-3])


def _points(svg):
    (points,) = re.findall(r'points="([^"]*)"', svg)
    return [tuple(map(float, pair.split(","))) for pair in points.split()]


def test_a_rising_line_goes_right_and_up_between_its_ticks():
    svg = line_chart([Line("a", [0, 1, 2], [0.0, 0.5, 1.0], "series-a")], str, bounds=(0, 1))
    (x0, y0), (x1, y1), (x2, y2) = _points(svg)
    assert x0 < x1 < x2 and x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 > y1 > y2 and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_a_log_scale_spaces_decades_evenly_and_leaves_zero_out():
    svg = line_chart([Line("a", [0, 1, 2, 3], [1, 0, 10, 100], "s")], str, log_scale=True)
    points = _points(svg)
    assert len(points) == 3
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.2)


def test_one_point_and_a_flat_line_are_drawn_inside():
    for xs, ys in (([5], [0.3]), ([1, 2], [0.0, 0.0])):
        for x, y in _points(line_chart([Line("a", xs, ys, "s", marked=True)], str)):
            assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT


def test_stacked_parts_touch_and_sum():
    svg = stacked_bars([0, 1], {"generate": [1.0, 2.0], "update": [3.0, 2.0]})
    rects = re.findall(r'class="phase-(\w+)"[^>]* y="([\d.]+)"[^>]* height="([\d.]+)"', svg)
    tops = {(name, i // 2): (float(y), float(h)) for i, (name, y, h) in enumerate(rects)}
    for step in (0, 1):
        y, height = tops["update", step]
        assert y + height == pytest.approx(tops["generate", step][0], abs=0.02)
    assert tops["update", 0][1] == pytest.approx(3 * tops["generate", 0][1], abs=0.1)
    assert tops["update", 0][0] == pytest.approx(tops["update", 1][0], abs=0.02)


def test_a_heatmap_is_darker_where_more_agrees_and_empty_where_nothing_was_measured():
    svg = heatmap(["layer 1", "layer 2"], [0, 10], [[0.99, None], [0.91, 0.95]])
    found = re.findall(r'fill-opacity="([\d.]+)"><title>(layer \d), step (\d+)', svg)
    strength = {(layer, step): float(value) for value, layer, step in found}
    assert strength["layer 1", "0"] > strength["layer 2", "10"] > strength["layer 2", "0"] > 0
    assert len(strength) == 3
    assert f'viewBox="0 0 {WIDE:g}' in svg


def test_labels_are_escaped():
    svg = line_chart([Line("<b>&", [0], [1.0], '"><script>')], str)
    assert "<script>" not in svg and "<b>" not in svg


def test_nothing_to_draw_draws_nothing():
    assert line_chart([], str) == stacked_bars([], {}) == heatmap([], [], []) == ""
