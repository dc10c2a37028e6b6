"""Alerts: sick series are found, and healthy ones are not, whatever their scale and noise."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.trainer import AlertsConfig
from rltrain.tracking.alerts import FALLS, WATCHED, Alert, Watch, windows
from rltrain.tracking.catalogue import METRICS

SETTINGS = AlertsConfig()
ENTROPY, LENGTH = "policy/entropy", "rollout/response_length_mean"
REWARD, SPEED, K3 = "reward/mean", "throughput/tokens_per_second", "mismatch/k3"
COVERAGE = "routing/coverage"


def alerts(metric: str, values: list[float], settings: AlertsConfig = SETTINGS) -> list[Alert]:
    """Of a run that logs one metric, from step 1 on."""
    watch = Watch(settings)
    return [a for step, v in enumerate(values, 1) for a in watch.take(step, {metric: v})]


def noisy(values: list[float], share: float = 0.03, seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [value * (1 + share * noise.gauss(0, 1)) for value in values]


def ramp(start: float, end: float, steps: int) -> list[float]:
    return [start + (end - start) * n / steps for n in range(1, steps + 1)]


HEALTHY = {
    ENTROPY: [0.9] * 30 + ramp(0.9, 0.3, 200),
    LENGTH: ramp(300, 200, 60) + ramp(200, 900, 200),
    REWARD: ramp(0.2, 0.9, 100) + [0.9] * 100,
    SPEED: [300.0, 900.0] + [2000.0] * 200,
    K3: [3e-5] * 200,
}
SICK = {
    ENTROPY: ramp(0.9, 0.02, 20),
    LENGTH: ramp(900, 20, 20),
    REWARD: ramp(0.9, 0.1, 20),
    SPEED: [600.0] * 20,
    K3: [0.02] * 20,
}
KINDS = {rule.metric: rule.kind for rule in FALLS} | {K3: "mismatch_spike"}


@pytest.mark.parametrize("metric", HEALTHY)
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_is_left_alone(metric: str, seed: int) -> None:
    assert alerts(metric, noisy(HEALTHY[metric], seed=seed)) == []


@pytest.mark.parametrize("metric", SICK)
@pytest.mark.parametrize("seed", range(5))
def test_a_fault_is_found_within_25_steps_and_said_once(metric: str, seed: int) -> None:
    healthy = noisy(HEALTHY[metric], seed=seed)
    found = alerts(metric, healthy + noisy(SICK[metric], seed=seed) + [SICK[metric][-1]] * 20)
    (alert,) = found
    assert (alert.kind, alert.metric) == (KINDS[metric], metric)
    assert 0 < alert.step - len(healthy) <= 25
    assert len(healthy) < alert.since <= alert.step
    assert (alert.value > alert.expected) == (metric == K3)
    assert "What to look at: " in alert.text


def test_a_slow_collapse_is_found_too() -> None:
    (alert, *_) = alerts(ENTROPY, [1.0] * 20 + ramp(1.0, 0.05, 400))
    assert alert.kind == "entropy_collapse"
    assert alert.expected == 1.0 and alert.value < 0.2


def test_a_reward_has_no_zero_of_its_own() -> None:
    """From -10 to -2 and back to -9; and a reward that never rose, and falls."""
    up, down = ramp(-10, -2, 60), ramp(-2, -9, 20)
    (alert,) = alerts(REWARD, noisy([-10.0] * 20, 0.01) + up + [-2.0] * 20 + down)
    assert alert.kind == "reward_collapse"
    assert len(alerts(REWARD, noisy([-5.0] * 40, 0.01) + [-7.0] * 10)) == 1
    rise = noisy([5.0] * 20, 0.002) + ramp(5, 6, 40) + noisy([6.0] * 20, 0.002)
    assert len(alerts(REWARD, rise + [5.2] * 20)) == 1  # four fifths of the gain are lost
    assert alerts(REWARD, noisy([-10.0] * 20, 0.01) + up + [-2.0] * 20 + [-4.0] * 20) == []


@pytest.mark.parametrize("seed", range(10))
def test_one_odd_step_is_no_fall(seed: int) -> None:
    for metric in (ENTROPY, LENGTH, REWARD, SPEED):
        values = noisy([1.0] * 100, seed=seed)
        values[50] = values[80] = 0.01
        assert alerts(metric, values) == []


# Of real runs of the tiny model.
RATE_TOO_HIGH = [0.64, 0.4, 0.14, 0.029, 0.086, 0.016, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
STDS = [0.48, 0.49, 0.35, 0.17, 0.28, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
STALE_ROUTES = [1e-5, 1.0, 1.4, 1.1]


def test_a_run_that_falls_before_there_is_a_window_is_found() -> None:
    watch = Watch(SETTINGS)
    rows = [{REWARD: r, "reward/std": s} for r, s in zip(RATE_TOO_HIGH, STDS, strict=True)]
    (alert,) = [a for step, row in enumerate(rows, 1) for a in watch.take(step, row)]
    assert (alert.kind, alert.step, alert.since) == ("reward_collapse", 6, 3)
    assert "It was 0.64 in the first step" in alert.text
    (alert,) = alerts(K3, STALE_ROUTES)
    assert (alert.kind, alert.step, alert.expected) == ("mismatch_spike", 2, SETTINGS.k3_limit)


@pytest.mark.parametrize("std", [0.0, 0.3])
def test_a_start_that_only_varies_is_no_collapse(std: float) -> None:
    watch = Watch(SETTINGS)
    for step, reward in enumerate(noisy([0.6] * 24, 0.1 * (std > 0)), 1):
        assert watch.take(step, {REWARD: reward, "reward/std": std}) == []


def test_a_constant_metric_may_move_a_little() -> None:
    assert alerts(REWARD, [1.0] * 50 + [0.99] * 20) == []
    assert alerts(LENGTH, [3.0] * 60) == []
    assert alerts(REWARD, [0.0] * 60) == []


def test_a_harmless_mismatch_is_no_spike_however_small_it_was() -> None:
    assert alerts(K3, [*noisy([1e-9] * 40), 5e-4]) == []
    assert alerts(K3, [0.0] * 40 + [5e-4]) == []
    usual = noisy([1e-3] * 40, 0.5)
    assert alerts(K3, [*usual, 9e-3]) == []
    assert [a.kind for a in alerts(K3, [*usual, 0.9])] == ["mismatch_spike"]


def test_stale_and_fresh_steps_in_turn_are_usual() -> None:
    """With trainer.sync_every=2 every other step is off-policy."""
    assert alerts(K3, noisy([1e-5, 3e-3] * 40, 0.3)) == []


def test_a_row_without_a_route_is_said_at_once() -> None:
    (alert,) = alerts(COVERAGE, [1.0, 1.0, 0.9999, 1.0])
    assert (alert.step, alert.since, alert.kind) == (3, 3, "missing_routes")
    assert "0.9999" in alert.text
    assert alerts(COVERAGE, [0.99] * 3, AlertsConfig(coverage=0.9)) == []


def test_a_fault_that_stays_is_said_again_after_a_while() -> None:
    settings = AlertsConfig(again_after=10)
    found = alerts(COVERAGE, [1.0] * 4 + [0.5] * 25, settings)
    assert [(a.step, a.since) for a in found] == [(5, 5), (15, 5), (25, 5)]


def test_alerts_can_be_switched_off() -> None:
    assert alerts(COVERAGE, [0.5] * 4, AlertsConfig(enabled=False)) == []


def test_a_resumed_run_remembers() -> None:
    values = [1.0] * 40 + ramp(1.0, 0.01, 20)
    (alert,) = alerts(ENTROPY, values)
    rows = [{"step": n, ENTROPY: v} for n, v in enumerate(values, 1)]
    cut = alert.step - 1
    watch = Watch(SETTINGS, rows[:cut])
    assert watch.take(alert.step, rows[cut]) == [alert]
    watch = Watch(SETTINGS, rows[: cut + 1], [{"step": alert.step, **alert.row()}])
    assert watch.take(alert.step + 1, rows[cut + 1]) == []


def test_what_was_not_measured_or_is_not_finite_is_skipped() -> None:
    watch = Watch(SETTINGS, [{"step": 0, "eval/accuracy": 0.5, REWARD: None}])
    assert watch.take(1, {REWARD: math.nan}) == []
    assert watch.take(2, {K3: math.inf}) == []
    for step in range(3, 40):
        assert watch.take(step, {REWARD: 0.5}) == []


def test_every_watched_metric_is_in_the_catalogue() -> None:
    assert {metric.name for metric in METRICS} >= WATCHED
    assert {rule.setting for rule in FALLS} <= set(AlertsConfig.model_fields)


SERIES = st.lists(st.floats(0.01, 100), max_size=80)


@given(SERIES, st.sampled_from([0.01, 0.5, 8.0, 1000.0]))
def test_entropy_length_and_speed_have_no_scale(values: list[float], factor: float) -> None:
    for metric in (ENTROPY, LENGTH, SPEED):
        once = [(a.step, a.kind, a.since) for a in alerts(metric, values)]
        scaled = [(a.step, a.kind, a.since) for a in alerts(metric, [v * factor for v in values])]
        assert once == scaled


@given(SERIES, st.floats(-50, 50))
def test_a_fall_is_one_of_the_recent_median(values: list[float], shift: float) -> None:
    """Whatever the series: what is said is true of it, and comes no sooner than it can."""
    for alert in alerts(REWARD, [v + shift for v in values]):
        assert alert.value < alert.expected
        assert alert.step >= SETTINGS.window + SETTINGS.recent
        assert alert.since <= alert.step


@given(SERIES)
def test_what_only_rises_raises_nothing(values: list[float]) -> None:
    for metric in (ENTROPY, LENGTH, REWARD, SPEED):
        assert alerts(metric, sorted(values)) == []


@given(st.lists(st.floats(-5, 5), max_size=40), st.integers(1, 9))
def test_windows_are_whole_and_in_order(values: list[float], window: int) -> None:
    *whole, latest = windows(values, window)
    assert [v for part in whole for v in part] == values[: len(values) // window * window]
    assert latest == values[-window:]
