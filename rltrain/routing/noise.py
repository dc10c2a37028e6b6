"""Estimates how wide flips by rounding can be, from the flips of the same step."""

from math import inf

import torch
from torch import Tensor

from rltrain.routing.deficits import NUM_BINS, REPLAYED, upper_edges
from rltrain.routing.flips import LayerFlips

MIN_RUNNERS_UP = 32
"""Minimum runners-up below a distance to estimate the share of replayed ones."""
NARROW = 0.25
WIDE = 8.0
"""A deficit above so many scales of the noise is wide. Rounding has heavier tails than a
Gaussian."""
LEAST_SPREAD, MOST_SPREAD = 1 / 32, 1.0
"""Bounds of the threshold for wide deficits, as shares of the spread of a layer's logits over
experts. The lower bound keeps a run without rounding from testing its last bit. The upper bound
keeps a run with wrong routes from taking them for noise."""
_SCALES = 1.475
"""Distance up to which Gaussian noise of scale 1 swaps a quarter of the scores."""


def noise_scale(runners_up: Tensor) -> float:
    """Scale of the noise between engine and trainer, from how often runners-up were replayed.

    A runner-up is the best expert that the trainer's router leaves out. If its distance is far
    below the noise, it is replayed about every second time. If it is far above, never. Up to a
    distance of 1.475 scales of Gaussian noise, a quarter of all runners-up are replayed. So the
    scale follows from the first distance, from 0 upwards, at which the share is below a quarter.
    Wrong routes replay experts at any distance, few of them close: they add K / E of the wrong rows
    to the share.

    Args:
        runners_up: `rltrain.routing.flips.LayerFlips`  # [256]

    Returns:
        In logits. It is an upper bound if nothing flips, and inf if no distance is free of flips or
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


def last_narrow_bin(flips: LayerFlips, noise: float, num_rows: int) -> int:
    """The last bin of `rltrain.routing.deficits` that rounding may reach in a layer.

    Args:
        noise: `noise_scale` of these flips
        num_rows: how many rows were judged
    """
    spread = flips.spread / max(1, num_rows)
    limit = min(max(WIDE * noise, LEAST_SPREAD * spread), MOST_SPREAD * spread)
    bin_number = int(torch.searchsorted(upper_edges(), limit))
    return min(max(bin_number, 1), NUM_BINS - 2)
