"""How wide the flips are that rounding makes, measured by the flips of the same step."""

from math import inf

import torch
from torch import Tensor

from rltrain.routing.deficits import NUM_BINS, REPLAYED, upper_edges
from rltrain.routing.flips import LayerFlips

MIN_RUNNERS_UP = 32
"""Runners-up below a distance before the share of those given is judged."""
NARROW = 0.25
WIDE = 8.0
"""Scales of the noise above which a deficit is wide. Rounding has heavier tails than a Gaussian."""
LEAST_SPREAD, MOST_SPREAD = 1 / 32, 1.0
"""Between these shares of the spread of a layer's logits over experts lies what is wide, whatever
the noise: a run without rounding does not judge by its last bit, and a run whose routes are wrong
cannot take them for noise."""
_SCALES = 1.475
"""Where a Gaussian of scale 1 swaps a quarter of all scores up to that distance."""


def noise_scale(runners_up: Tensor) -> float:
    """Scale of the difference between engine and trainer, from who was given how often.

    The best expert that a router leaves out is given anyway about every second time if its
    distance is far below the noise, and never if it is far above. Up to 1.475 scales of a
    Gaussian a quarter of all are given: the first distance at which it is less, read from 0
    upwards, yields the scale. Wrong routes give experts at any distance, few of them close by:
    they add their own share, K / E of the rows that are wrong, to a quarter.

    Args:
        runners_up: `rltrain.routing.flips.LayerFlips`  # [256]

    Returns:
        In logits; an upper bound where nothing flips; inf where no distance is free of flips or
        there are too few rows.
    """
    replayed = runners_up[REPLAYED:].cumsum(0)
    total = runners_up[:REPLAYED].cumsum(0) + replayed
    error = 2 * (NARROW * (1 - NARROW) * total).sqrt()
    quiet = (total >= MIN_RUNNERS_UP) & (replayed + error < NARROW * total)
    quiet[-1] = False  # of experts that cannot be chosen
    if not quiet.any():
        return inf
    return float(upper_edges()[int(quiet.int().argmax())]) / _SCALES


def last_narrow_bin(flips: LayerFlips, num_rows: int) -> int:
    """The last bin of `rltrain.routing.deficits` that rounding may reach in a layer.

    Args:
        num_rows: how many rows were judged
    """
    spread = flips.spread / max(1, num_rows)
    noise = WIDE * noise_scale(flips.runners_up)
    limit = min(max(noise, LEAST_SPREAD * spread), MOST_SPREAD * spread)
    bin_number = int(torch.searchsorted(upper_edges(), limit))
    return min(max(bin_number, 1), NUM_BINS - 2)
