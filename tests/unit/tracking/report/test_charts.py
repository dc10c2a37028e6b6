"""Which charts a run gets, and what each draws."""

import base64
import math
import random

import numpy as np
import pytest

from rltrain.tracking.catalogue import METRICS
from rltrain.tracking.report.chart_specs import LEARNING, MISMATCH, TIME
from rltrain.tracking.report.charts import ChartPage, draw, log_choice
from rltrain.tracking.report.heatmaps import add_layer_heatmaps, held, phase_chart
from rltrain.tracking.report.series import Series, read_series


def _charts(rows, specs=LEARNING):
    page = ChartPage()
    for spec in specs:
        draw(page, "section", spec, read_series(rows))
    return {chart.title: chart for chart in page.sections.get("section", [])}


def _labels(chart):
    return [line.label for line in chart.lines]


def test_every_line_names_a_metric_of_the_catalogue_or_of_another_version():
    """A renamed metric would leave its chart empty."""
    names = [metric.name.replace("{", "").replace("}", "") for metric in METRICS]
    names += [f"eval/set/{name.removeprefix('eval/')}" for name in names if "eval/" in name]
    for spec in (*LEARNING, *MISMATCH, *TIME):
        for line in spec.lines:
            assert line.matching(names), f"{spec.title}: nothing is called {line.pattern}"


def test_every_evaluation_set_and_reward_part_has_a_line_of_its_own():
    row = {"step": 1, "eval/accuracy": 0.5, "eval/gsm8k/accuracy": 0.4, "eval/aime/accuracy": 0.1}
    row |= {"reward/part/format": 1.0, "eval/part/accuracy": 0.7}
    charts = _charts([row, {**row, "step": 2}])
    assert _labels(charts["Accuracy on held-out problems"]) == [
        "all evaluation problems",
        "aime",
        "gsm8k",
    ]
    assert _labels(charts["Parts of the reward"]) == ["format", "accuracy, evaluation"]


def test_a_chart_without_values_is_left_out():
    rows = [{"step": 1, "policy/entropy": None, "reward/failed_fraction": 0.0}]
    assert _charts(rows) == {}
    assert "Failed rewards" in _charts([{"step": 1, "reward/failed_fraction": 0.1}])


def test_a_long_noisy_reward_has_its_mean_and_a_short_one_has_not():
    rows = [{"step": i, "reward/mean": 0.1} for i in range(30)]
    chart = _charts(rows)["Mean reward in training"]
    assert _labels(chart) == ["reward, each step", "reward, mean of 9 steps"]
    assert _labels(_charts(rows[:10])["Mean reward in training"]) == ["reward"]


def test_spikes_are_marked_and_the_caption_says_the_rule():
    noise = random.Random(0)
    rows = [{"step": i, "mismatch/k3": noise.lognormvariate(-9, 0.3)} for i in range(60)]
    quiet = _charts(rows, MISMATCH)["k3 over all response tokens"]
    assert not quiet.lines[0].spikes and "spike" not in quiet.caption
    rows[33]["mismatch/k3"] = 0.1
    chart = _charts(rows, MISMATCH)["k3 over all response tokens"]
    assert chart.lines[0].spikes == ((33, 0.1),)
    assert "1 value is marked as a spike: robust z-score above 4.5" in chart.caption


@pytest.mark.parametrize(
    ("values", "wanted", "choice"),
    [
        ([1.0, 2.0], False, "off"),
        ([1e-4, 2.0], False, "switch"),
        ([0.0, 1e-4, 2.0], False, "switch"),
        ([-1.0, 1e-4, 2.0], False, "off"),
        ([1.0, 1.1], True, "on"),
        ([0.0], True, "off"),
    ],
)
def test_a_log_axis_is_offered_where_values_are_positive_and_span_decades(values, wanted, choice):
    assert log_choice(values, wanted) == choice


def test_a_summary_tells_a_screen_reader_the_first_and_the_last_value():
    rows = [{"step": 1, "policy/entropy": 0.9}, {"step": 7, "policy/entropy": 0.25}]
    chart = _charts(rows)["Entropy of the policy"]
    assert chart.summary == "Entropy of the policy: mean from 0.9 at 1 to 0.25 at 7"


def test_values_of_layers_are_held_until_the_next_measurement_and_binned_in_long_runs():
    page = ChartPage()
    rows = [
        {"step": 1, "routing/overlap/layer_2": 0.5, "routing/overlap/layer_11": 0.25},
        {"step": 3, "routing/overlap/layer_2": 1.0},
        {"step": 4, "reward/mean": 0.1},
    ]
    add_layer_heatmaps(page, "mismatch", read_series(rows))
    (chart,) = page.sections["mismatch"]
    assert chart.heatmap["layers"] == [2, 11] and chart.heatmap["columns"] == 4
    values = np.frombuffer(base64.b64decode(chart.heatmap["values"]), "<f4").reshape(2, 4)
    assert values.tolist() == [[0.5, 0.5, 1.0, 1.0], [0.25] * 4]
    assert "A measurement fills the columns up to the next one." in chart.caption
    long = [{"step": i, "routing/overlap/layer_0": i % 2} for i in range(1000)]
    page = ChartPage()
    add_layer_heatmaps(page, "mismatch", read_series(long))
    (chart,) = page.sections["mismatch"]
    assert chart.heatmap["columns"] == 200 and "the mean of 5 steps" in chart.caption


def test_what_was_not_measured_yet_stays_empty():
    assert math.isnan(held([math.nan, 1.0, math.nan])[0])
    assert held([math.nan, 1.0, math.nan])[1:] == [1.0, 1.0]


def test_phases_are_bars_that_sum_to_the_step():
    rows = [
        {"step": i, "time/generate": 2.0, "time/update": 1.0, "time/other": 0.5, "time/step": 3.5}
        for i in range(1, 301)
    ]
    rows[0]["time/eval"] = 8.0
    page = ChartPage()
    chart = phase_chart(page, read_series(rows))
    assert [line.label.split(" ")[0] for line in chart.lines] == [
        "generate",
        "update",
        "eval",
        "other",
    ]
    assert "A bar is the mean of 2 steps." in chart.caption
    bars = {line.label.split(" ")[0]: page.series[line.key] for line in chart.lines}
    assert bars["eval"].values[:2] == [4.0, 0.0] and bars["generate"].values[0] == 2.0
    assert bars["eval"].steps[:2] == [1, 3] and len(bars["eval"].steps) == 150


def test_a_page_of_many_series_thins_them():
    page = ChartPage()
    for i in range(400):
        page.series[f"m{i}"] = Series(list(range(5000)), [float(i)] * 5000)
    data = page.data()
    assert sum(len(entry[1]) for entry in data["series"].values()) < 2_300_000
    assert data["series"]["m0"][2] == 5000
