"""The softmax of logits that are never all in one place.

A `SoftmaxState` is kept of a block's logits, some numbers a token. States add up, of any block and
rank (Milakov and Gimelshein, arXiv:1805.02867). Then the gradient of each block follows
from its own logits, or from its `Weights`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny
"""What a weight that was too small for its dtype counts as: none, but with a logarithm."""

SoftmaxState = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of some logits: the largest; over it, the sum of their exponentials, and of those times the
logit; the target's own logit or 0.  # float32 [S] each"""


@dataclass(frozen=True)
class Weights:
    """A block's probabilities, but for what blocks to come add to the softmax."""

    values: Tensor  # exp(logit / temperature - peak), in any dtype  # [S, V]
    peak: Tensor  # float32 [S]


def init_state(local: Tensor) -> SoftmaxState:
    zeros = torch.zeros_like(local, dtype=torch.float32)
    return torch.full_like(zeros, LOWEST), zeros, zeros, zeros


def update(
    state: SoftmaxState,
    logits: Tensor,
    local: Tensor,
    temperature: float,
    weights: Tensor | None = None,
) -> SoftmaxState:
    """``state`` and the block ``logits``, in which the target is column ``local``, if in any.

    Args:
        weights: is filled with the values of the block's `Weights`, whose peak the result has
    """
    scores = logits.float() / temperature
    peak = torch.maximum(state[0], scores.amax(-1))
    shifted = scores - peak.unsqueeze(1)
    each = shifted.exp()
    if weights is not None:
        weights.copy_(each)
    total, expected = _relative_to(peak, state)
    inside = (local >= 0) & (local < scores.shape[1])
    own = scores.gather(1, local.clamp(0, scores.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return (
        peak,
        total + each.sum(-1),
        expected + (each * shifted).sum(-1),
        state[3] + torch.where(inside, own, 0.0),
    )


def _relative_to(peak: Tensor, state: SoftmaxState) -> tuple[Tensor, Tensor]:
    """The sums of a state over a larger logit."""
    lower = state[0] - peak
    scale = lower.exp()
    return state[1] * scale, (state[2] + state[1] * lower) * scale


def over_ranks(state: SoftmaxState, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, largest logit, log of the sum over it, entropy.  # [S] each"""
    peak, total, expected, chosen = state
    if group is not None:
        peak = peak.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack([*_relative_to(peak, state), chosen])
        dist.all_reduce(sums, group=group)
        total, expected, chosen = sums.unbind()
    log_total = total.log()
    return chosen - peak - log_total, peak, log_total, log_total - expected / total


def backward(
    block: Tensor | Weights,
    local: Tensor,
    softmax: Sequence[Tensor],
    grads: tuple[Tensor, Tensor],
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a block's logits.

    Args:
        block: its logits, or what is left of them
        softmax: what `over_ranks` returns after the log-probability
        grads: of log-probability and entropy  # [S] each
    """
    peak, log_total, entropy = (each.unsqueeze(1) for each in softmax)
    of_logprob, of_entropy = (each.unsqueeze(1) for each in grads)
    if isinstance(block, Weights):
        scores = block.values.float().clamp_min(TINY).log() + block.peak.unsqueeze(1)
    else:
        scores = block.float() / temperature
    log_p = scores - peak - log_total
    columns = torch.arange(scores.shape[1], device=scores.device)
    # d logprob / d logit_j = [j = target] - p_j; d entropy / d logit_j = -p_j (log p_j + entropy)
    grad = torch.where(columns == local.unsqueeze(1), of_logprob, 0.0)
    grad = grad - log_p.exp() * (of_logprob + of_entropy * (log_p + entropy))
    return (grad / temperature).to(dtype)
