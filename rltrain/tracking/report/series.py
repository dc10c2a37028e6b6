"""Numbers over steps: read from rows, thinned, smoothed, searched for spikes, packed for a page.

Pure functions. A page holds values as base64 of little-endian float32, and steps as base64 of the
uint16 distances between them. Series logged at the same steps share one array of steps.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SMOOTHING_WINDOW = 9
SPIKE_WINDOW = 51
SPIKE_Z = 4.5
FEWEST_FOR_SPIKES = 12


@dataclass(frozen=True)
class Series:
    """Values over steps, or over seconds. NaN where a value was logged and not finite."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


def read_series(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Every metric of the rows by name, at the steps where it was logged."""
    series: dict[str, Series] = {}
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name != "step":
                one = series.setdefault(name, Series())
                one.steps.append(step)
                one.values.append(math.nan if value is None else value)
    return series


def smoothed(series: Series, window: int = SMOOTHING_WINDOW) -> Series:
    """The centred mean over ``window`` values, fewer at both ends; NaN is left out."""
    values = np.array(series.values)
    known = np.isfinite(values)
    ones = np.ones(window)
    counts = np.convolve(known, ones, "same")
    sums = np.convolve(np.where(known, values, 0.0), ones, "same")
    with np.errstate(invalid="ignore"):
        return Series(series.steps, np.where(counts > 0, sums / counts, np.nan).tolist())


def spikes(series: Series) -> list[int]:
    """Indices of values far above the values around them, by a robust z-score.

    The score of a value is its distance from the median of the ``SPIKE_WINDOW`` values around it,
    over 1.4826 times their median absolute deviation. Positive metrics are compared by their
    logarithm: a mismatch spreads over decades. A scale of 0 is replaced by 1 % of the median, so
    that one outlier of a constant metric is found.
    """
    values = np.array(series.values)
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < FEWEST_FOR_SPIKES:
        return []
    clean = values[known]
    if (clean > 0).all():
        clean = np.log(clean)
        smallest_scale = 0.01
    else:
        smallest_scale = 0.01 * float(np.median(np.abs(clean))) or 1e-12
    width = min(SPIKE_WINDOW, len(clean))
    windows = np.lib.stride_tricks.sliding_window_view(clean, width)
    first = np.clip(np.arange(len(clean)) - width // 2, 0, len(windows) - 1)
    medians = np.median(windows, axis=1)
    deviations = np.median(np.abs(windows - medians[:, None]), axis=1)
    scale = np.maximum(1.4826 * deviations[first], smallest_scale)
    scores = (clean - medians[first]) / scale
    return known[scores > SPIKE_Z].tolist()


def thinned(series: Series, points: int) -> Series:
    """At most ``points`` points: of each of ``points / 2`` intervals the lowest and the highest."""
    if len(series.steps) <= points:
        return series
    values = np.array(series.values)
    kept: set[int] = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), max(1, (points - 2) // 2)):
        known = part[np.isfinite(values[part])]
        if len(known):
            kept |= {int(known[values[known].argmin()]), int(known[values[known].argmax()])}
    order = sorted(kept)
    return Series([series.steps[i] for i in order], [series.values[i] for i in order])


def binned(series: Series, first: int, width: int, count: int) -> list[float]:
    """Means of ``count`` bins of ``width`` steps from step ``first``; NaN where a bin is empty."""
    sums, counts = np.zeros(count), np.zeros(count)
    values = np.array(series.values)
    known = np.isfinite(values)
    index = ((np.array(series.steps)[known] - first) // width).astype(int)
    np.add.at(sums, index, values[known])
    np.add.at(counts, index, 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums / counts).tolist()


def pack(values: Sequence[float]) -> str:
    """Base64 of little-endian float32. What float32 cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode("ascii")


def pack_steps(steps: Sequence[float]) -> list[Any]:
    """The first step and the packed distances to the next ones; else float32, after a null."""
    distances = np.diff(np.array(steps))
    if all(0 <= d < 2**16 and d == int(d) for d in distances.tolist()):
        packed = base64.b64encode(distances.astype("<u2").tobytes()).decode("ascii")
        return [steps[0] if steps else 0, packed]
    return [None, pack(steps)]


@dataclass
class PackedSeries:
    """The series of one page, by key, for its JSON."""

    steps: list[list[Any]] = field(default_factory=list)
    series: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> number of its array of steps, packed values, number of points before thinning."""

    _numbers: dict[tuple[float, ...], int] = field(default_factory=dict)

    def add(self, key: str, series: Series, points: int) -> None:
        drawn = thinned(series, points)
        number = self._numbers.setdefault(tuple(drawn.steps), len(self.steps))
        if number == len(self.steps):
            self.steps.append(pack_steps(drawn.steps))
        self.series[key] = [number, pack(drawn.values), len(series.steps)]
