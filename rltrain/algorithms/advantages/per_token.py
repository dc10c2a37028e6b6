"""Functions for advantages that differ from token to token, in float64."""

import torch
from torch import Tensor

VARIANCE_EPS = 1e-8


def discounted_sums(terms: Tensor, decay: float, owner: Tensor) -> Tensor:
    """``y_t = x_t + decay * y_(t+1)`` within each sequence, 0 after its end.

    Args:
        terms: one per masked token  # [M]
        owner: sequence number of each; tokens of a sequence are adjacent  # [M]

    Returns:
        float64  # [M]
    """
    sums: list[float] = []
    later, sequence = 0.0, None
    for term, sequence_now in zip(reversed(terms.tolist()), reversed(owner.tolist()), strict=True):
        later = term + decay * later if sequence_now == sequence else term
        sequence = sequence_now
        sums.append(later)
    return torch.tensor(sums[::-1], dtype=torch.float64)


def whitened(values: Tensor) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + 1e-8)`` with the biased variance (division by the count), as
    in the code of arXiv:1909.08593 (openai/lm-human-preferences, ``core.whiten``). Exactly 0 if
    all values are equal: their distance from the mean is only rounding.  # [M] -> [M]
    """
    values = values.double()
    if len(values) == 0 or bool(values.min() == values.max()):
        return torch.zeros_like(values)
    centered = values - values.mean()
    return centered / (centered.square().mean() + VARIANCE_EPS).sqrt()
