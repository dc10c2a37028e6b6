"""When a run looks sick: rules over what it has logged so far. Pure.

A rule compares a metric with its own past, by medians and the median absolute deviation (MAD): one
odd step neither raises an alarm nor hides one. docs/tracking.md says what each rule asks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from rltrain.config.trainer import AlertsConfig

MAD_TO_SIGMA = 1.4826
"""Of a normal distribution: standard deviation over MAD."""
LEAST_NOISE = 0.01
"""Share of its level that a metric may move without being noisy: some are constant for long."""

Kind = Literal[
    "entropy_collapse",
    "length_collapse",
    "reward_collapse",
    "throughput_drop",
    "mismatch_spike",
    "missing_routes",
]


@dataclass(frozen=True)
class Alert:
    """What is wrong in ``step``, since when, by how much and what to look at."""

    step: int
    kind: Kind
    since: int
    metric: str
    value: float
    expected: float
    text: str

    @property
    def title(self) -> str:
        """``entropy collapse``, for people."""
        return self.kind.replace("_", " ")

    def row(self) -> dict[str, Any]:
        """Without the step, which every line of alerts.jsonl has."""
        return {name: value for name, value in asdict(self).items() if name != "step"}


@dataclass
class Series:
    """The steps at which a metric was measured, and its finite values there."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


History = Mapping[str, Series]


@dataclass(frozen=True)
class Fall:
    """A metric that must not fall far below a level of its own past.

    ``of`` is that level. ``before``: the median of the window before the recent steps. ``best``:
    the highest median of any window so far. ``gain``: likewise, and what counts is how much is left
    of what was gained since the first window, as a reward has no zero of its own.
    """

    kind: Kind
    metric: str
    of: Literal["before", "best", "gain"]
    setting: Literal["entropy", "length", "reward", "throughput"]
    look_at: str


REWARD_ADVICE = (
    "see policy/grad_norm, policy/ratio_max and mismatch/k3 of the steps before; go back to a "
    "checkpoint from before it, with a lower optimizer.lr [RL5103]"
)
FALLS = (
    Fall(
        "entropy_collapse",
        "policy/entropy",
        "best",
        "entropy",
        "the policy has almost stopped exploring. See policy/clip_fraction_high, policy/grad_norm "
        "and group/zero_std_fraction; try a lower optimizer.lr, a higher algorithm.clip_high, or "
        "algorithm.entropy_coef [RL5101]",
    ),
    Fall(
        "length_collapse",
        "rollout/response_length_mean",
        "best",
        "length",
        "read rollouts.jsonl: does a short response earn as much as a long one, or does generation "
        "stop early? See the parts of the reward and rollout.stop [RL5102]",
    ),
    Fall(
        "reward_collapse",
        "reward/mean",
        "gain",
        "reward",
        REWARD_ADVICE,
    ),
    Fall(
        "throughput_drop",
        "throughput/tokens_per_second",
        "before",
        "throughput",
        "see which phase under time/ has grown, gpu/memory_gib, and what else uses this machine "
        "[RL5104]",
    ),
)


def find_alerts(history: History, settings: AlertsConfig) -> list[Alert]:
    """What is wrong in the last step of ``history``, whatever was said of it before."""
    last = max((series.steps[-1] for series in history.values() if series.steps), default=0)
    current = {
        name: series
        for name, series in history.items()
        if series.steps and series.steps[-1] == last  # a metric may not be measured in every step
    }
    alerts = [
        fallen(rule, current[rule.metric], settings) for rule in FALLS if rule.metric in current
    ]
    if {"reward/mean", "reward/std"} <= current.keys():
        alerts.append(early_collapse(current["reward/mean"], current["reward/std"], settings))
    if "mismatch/k3" in current:
        alerts.append(mismatch_spike(current["mismatch/k3"], settings))
    if "routing/coverage" in current:
        alerts.append(missing_routes(current["routing/coverage"], settings))
    return [alert for alert in alerts if alert is not None]


def fallen(rule: Fall, series: Series, settings: AlertsConfig) -> Alert | None:
    """The rule's alert if the recent steps lie below its share of the level, by more than noise."""
    # A machine that others use has slow steps now and then: the throughput has to last longer.
    count = settings.recent * (2 if rule.of == "before" else 1)
    past, recent = series.values[:-count], series.values[-count:]
    if len(past) < settings.window:
        return None
    first, *later = windows(past, settings.window)
    # Noise is that of the window of the level: later ones may hold a part of the fall.
    window = later[-1] if rule.of == "before" else max((first, *later), key=median)
    level, zero = median(window), median(first) if rule.of == "gain" else 0.0
    limit = zero + getattr(settings, rule.setting) * (level - zero)
    limit = min(limit, level - settings.noise * sigma(window, level) * median_error(count))
    value = median(recent)
    if not value < limit:
        return None
    text = (
        f"{rule.metric} is {value:.4g}, the median of {count} steps. It was {level:.4g}, "
        f"{'before that' if rule.of == 'before' else 'at its best'}, the median of "
        f"{settings.window} steps. What to look at: {rule.look_at}"
    )
    since = first_below(series, limit)
    return Alert(series.steps[-1], rule.kind, since, rule.metric, value, level, text)


def early_collapse(reward: Series, std: Series, settings: AlertsConfig) -> Alert | None:
    """The reward before there is a window: it lost more since the first step than the standard
    deviation of single rewards, which no mean of many loses by chance."""
    if not settings.recent < len(reward.values) < settings.window + settings.recent:
        return None
    level, value = reward.values[0], median(reward.values[-settings.recent :])
    limit = level - max(*std.values, LEAST_NOISE * abs(level))
    if value >= limit:
        return None
    text = (
        f"reward/mean is {value:.4g}, the median of {settings.recent} steps. It was {level:.4g} in "
        f"the first step. What to look at: {REWARD_ADVICE}"
    )
    since = first_below(reward, limit)
    return Alert(reward.steps[-1], "reward_collapse", since, "reward/mean", value, level, text)


def mismatch_spike(series: Series, settings: AlertsConfig) -> Alert | None:
    """One step whose k3 is far above those before it and above what can be called harmless, or
    above what is never harmless."""
    *past, value = series.values
    before = [math.log(k3) for k3 in past[-settings.window :] if k3 > 0]
    limit = settings.k3_limit
    if len(before) >= settings.window // 2:
        factor = max(math.log(settings.k3_factor), settings.noise * _mad_sigma(before))
        limit = min(limit, max(settings.k3_floor, math.exp(median(before) + factor)))
    if value <= limit:
        return None
    step = series.steps[-1]
    usual = f"; the median of the steps before is {math.exp(median(before)):.2g}" if before else ""
    text = (
        f"mismatch/k3 is {value:.2g}, above {limit:.2g}{usual}. Engine and trainer disagree about "
        "this step's rollouts. What to look at: rollout/weight_version and rollout/staleness, "
        "routing/overlap by layer, and mismatch/worst_sequence [RL5105]"
    )
    return Alert(step, "mismatch_spike", step, "mismatch/k3", value, limit, text)


def missing_routes(series: Series, settings: AlertsConfig) -> Alert | None:
    step, value = series.steps[-1], series.values[-1]
    if value >= settings.coverage:
        return None
    text = (
        f"routing/coverage is {value:.6g}: {1 - value:.2g} of the rows came without the engine's "
        "routes, and fall back as routing_replay.fallback says. What to look at: the log for the "
        "engine's warnings, routing/fallback_fraction and docs/routes.md [RL5106]"
    )
    since = first_below(series, settings.coverage)
    return Alert(step, "missing_routes", since, "routing/coverage", value, settings.coverage, text)


def windows(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Whole ones, end to end from the first value on, and the one of the latest values."""
    whole = [values[n : n + size] for n in range(0, len(values) - size + 1, size)]
    return [*whole, values[-size:]]


def sigma(values: Sequence[float], level: float) -> float:
    return max(_mad_sigma(values), LEAST_NOISE * abs(level))


def median_error(count: int) -> float:
    """Of the median of ``count`` normal values: its standard deviation in units of theirs."""
    return math.sqrt(math.pi / 2 / count)


def _mad_sigma(values: Sequence[float]) -> float:
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def first_below(series: Series, limit: float) -> int:
    """The first of the latest steps that all lie below ``limit``, odd single ones aside."""
    since, above = series.steps[-1], 0
    for step, value in zip(reversed(series.steps), reversed(series.values), strict=True):
        above = 0 if value < limit else above + 1
        if above == 2:
            break
        since = step if value < limit else since
    return since


class Watch:
    """Follows a run: each kind of alert at most once in ``settings.again_after`` steps.

    Args:
        rows: the lines of metrics.jsonl so far, of a resumed run
        raised: likewise of alerts.jsonl
    """

    def __init__(
        self,
        settings: AlertsConfig,
        rows: Iterable[Mapping[str, Any]] = (),
        raised: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._settings = settings
        self._history: dict[str, Series] = {name: Series() for name in WATCHED}
        self._raised: dict[str, int] = {row["kind"]: row["step"] for row in raised}
        for row in rows:
            self._add(row["step"], row)

    def take(self, step: int, metrics: Mapping[str, float]) -> list[Alert]:
        """The new alerts after this step."""
        if not self._settings.enabled:
            return []
        self._add(step, metrics)
        new = [
            alert
            for alert in find_alerts(self._history, self._settings)
            if alert.step == step
            and step - self._raised.get(alert.kind, -math.inf) >= self._settings.again_after
        ]
        self._raised |= {alert.kind: step for alert in new}
        return new

    def _add(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name in WATCHED & metrics.keys():
            value = metrics[name]
            if value is not None and math.isfinite(value):
                self._history[name].steps.append(step)
                self._history[name].values.append(float(value))


WATCHED = {rule.metric for rule in FALLS} | {"reward/std", "mismatch/k3", "routing/coverage"}
