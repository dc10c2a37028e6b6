"""Whether a series of samples grows with the step, beyond its noise: pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

BLOCKS = 8
"""Into which a series is cut. Samples of neighbouring steps are not independent."""
RESAMPLES = 500
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
    x, y = _thinned(steps), _thinned(values)
    slope, size = theil_sen(x, y), len(y) // BLOCKS
    growth = float(np.median(y[-size:]) - np.median(y[:size]))
    residuals = y - slope * x
    starts = np.random.default_rng(seed).integers(0, len(y) - size + 1, (RESAMPLES, BLOCKS + 1))
    noise = residuals[starts[:, :, None] + np.arange(size)].reshape(RESAMPLES, -1)[:, : len(y)]
    low, high = np.percentile(least_squares(x, noise), [2.5, 97.5])
    return Slope(slope, slope + float(low), slope + float(high), growth)


def theil_sen(steps: Sequence[float] | Series, values: Sequence[float] | Series) -> float:
    """The median of the slopes of all pairs: a jump of a few samples does not move it."""
    x, y = np.asarray(steps, float), np.asarray(values, float)
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def least_squares(steps: Series, values: Series) -> Series:
    """The slopes of several series [n, steps]."""
    away = steps - steps.mean()
    return np.asarray(values @ away / (away @ away))


def _thinned(series: Sequence[float]) -> Series:
    every = -(-len(series) // MOST_POINTS)
    return np.asarray(series[::every], float)
