"""Whether a series of samples grows with the step, beyond its noise: pure functions."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12
"""Into which a series is cut. Samples of neighbouring steps are not independent."""
RESAMPLES = 1000
MOST_POINTS = 200
"""Of a fit: the slope of all pairs takes their square."""


@dataclass(frozen=True)
class Slope:
    """Growth per step, and the 95 % interval it lies in."""

    value: float
    low: float
    high: float
    growth: float
    """Median of the last block less that of the first."""

    @property
    def grows(self) -> bool:
        """More than noise explains."""
        return self.low > 0 and self.growth > 0


def slope_of(steps: Sequence[int], values: Sequence[float], seed: int = 0) -> Slope:
    """Theil-Sen's slope, and its interval by a bootstrap of the residuals' blocks.

    Residuals are drawn in runs of neighbours, so that what moves slowly about the line counts as
    noise. Of a series that never changes the slope and its interval are 0.

    Raises:
        ValueError: too few samples.
    """
    if len(steps) != len(values) or len(steps) < 2 * BLOCKS:
        raise ValueError(f"expected at least {2 * BLOCKS} samples, found {len(values)}")
    steps, values = _thinned(steps), _thinned(values)
    slope = theil_sen(steps, values)
    growth = _median(values[-len(values) // BLOCKS :]) - _median(values[: len(values) // BLOCKS])
    residuals = [value - slope * step for step, value in zip(steps, values, strict=True)]
    drawn = random.Random(seed)
    size = max(1, len(values) // BLOCKS)
    slopes = sorted(_resampled(steps, residuals, size, drawn) for _ in range(RESAMPLES))
    reach = slopes[int(0.025 * RESAMPLES)], slopes[int(0.975 * RESAMPLES)]
    return Slope(slope, slope + reach[0], slope + reach[1], growth)


def theil_sen(steps: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes of all pairs: a jump of a few samples does not move it."""
    return _median(
        [
            (values[j] - values[i]) / (steps[j] - steps[i])
            for j in range(len(steps))
            for i in range(j)
        ]
    )


def _resampled(
    steps: Sequence[float], residuals: Sequence[float], size: int, drawn: random.Random
) -> float:
    """The least squares slope of residuals whose blocks were drawn anew: that of noise alone."""
    last = len(residuals) - size
    noise: list[float] = []
    while len(noise) < len(steps):
        start = drawn.randint(0, last)
        noise += residuals[start : start + size]
    return least_squares(steps, noise[: len(steps)])


def least_squares(steps: Sequence[float], values: Sequence[float]) -> float:
    middle, mean = sum(steps) / len(steps), sum(values) / len(values)
    below = math.fsum((step - middle) ** 2 for step in steps)
    above = math.fsum((s - middle) * (v - mean) for s, v in zip(steps, values, strict=True))
    return above / below


def _thinned(series: Sequence[float]) -> list[float]:
    every = -(-len(series) // MOST_POINTS)
    return list(series[::every])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
