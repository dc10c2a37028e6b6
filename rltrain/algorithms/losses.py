"""Per-token losses. Every one is summed with weights that come from outside (`reduce`)."""

import torch
from torch import Tensor

from rltrain.algorithms.kl import MAX_LOG_RATIO


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi(y) / pi_old(y) of each sampled token.  # [N], [N] -> [N]"""
    return torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's pessimistic loss (arXiv:1707.06347, equation 7, negated) with two clip ranges (DAPO,
    arXiv:2503.14476, equation 10): ``-min(r A, clip(r, 1 - low, 1 + high) A)``.  # [N] -> [N]
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """True where clipping removed the gradient.  # [N] -> [N] bool"""
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return too_high | too_low
