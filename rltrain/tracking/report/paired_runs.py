"""How two runs differ, with 95 % intervals: shares of problems, and values paired by step.

Steps of a run are correlated. Differences are therefore averaged in blocks of consecutive steps,
and the interval is Student's t over the block means.
"""

import math
from dataclasses import dataclass

import numpy as np

from rltrain.tracking.report.series import Series
from rltrain.tracking.report.verdicts import share_spread

T_95 = {5: 2.776, 10: 2.262}
"""Number of blocks -> two-sided 95 % of Student's t with one degree of freedom fewer."""
FEWEST_STEPS = {5: 10, 10: 40}


@dataclass(frozen=True)
class Interval:
    """The second run less the first, or the logarithm of their ratio; ``basis`` says of what."""

    difference: float
    half: float
    basis: str

    @property
    def low(self) -> float:
        return self.difference - self.half

    @property
    def high(self) -> float:
        return self.difference + self.half

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def paired_steps(first: Series, second: Series, share: float = 1.0) -> list[tuple[float, float]]:
    """The finite values of both runs at the last ``share`` of the steps that both logged."""
    other = dict(zip(second.steps, second.values, strict=True))
    pairs = [
        (value, other[step])
        for step, value in zip(first.steps, first.values, strict=True)
        if step in other and math.isfinite(value) and math.isfinite(other[step])
    ]
    return pairs[len(pairs) - math.ceil(share * len(pairs)) :]


def block_interval(differences: list[float]) -> Interval | None:
    """The mean of a run of differences with its 95 % interval; None for fewer than 10."""
    count = max((k for k, fewest in FEWEST_STEPS.items() if len(differences) >= fewest), default=0)
    if not count:
        return None
    means = [float(block.mean()) for block in np.array_split(np.array(differences), count)]
    half = T_95[count] * float(np.std(means, ddof=1)) / math.sqrt(count)
    return Interval(float(np.mean(means)), half, f"{len(differences)} steps in {count} blocks")


def mean_difference(first: Series, second: Series, share: float) -> Interval | None:
    """Second less first, over the last ``share`` of their common steps."""
    return block_interval([b - a for a, b in paired_steps(first, second, share)])


def log_ratio(first: Series, second: Series) -> Interval | None:
    """log(second / first) over their common steps after the first, where both are positive."""
    pairs = paired_steps(first, second)[1:]
    return block_interval([math.log(b / a) for a, b in pairs if a > 0 and b > 0])


def share_difference(
    first: tuple[Series, Series], second: tuple[Series, Series]
) -> Interval | None:
    """Second less first at the last step that both evaluated.

    Args:
        first, second: the share of correct responses, and the number of scored problems
    """
    share_a, count_a, share_b, count_b = (
        dict(zip(one.steps, one.values, strict=True)) for one in (*first, *second)
    )
    usable = [
        step
        for step in share_a.keys() & share_b.keys() & count_a.keys() & count_b.keys()
        if 0 <= share_a[step] <= 1
        and 0 <= share_b[step] <= 1
        and count_a[step] > 0
        and count_b[step] > 0
    ]
    if not usable:
        return None
    step = max(usable)
    n, m = count_a[step], count_b[step]
    half = share_spread((share_a[step], n), (share_b[step], m))
    problems = f"{n:g} problems" if n == m else f"{n:g} and {m:g} problems"
    return Interval(share_b[step] - share_a[step], half, f"{problems}, step {step:g}")
