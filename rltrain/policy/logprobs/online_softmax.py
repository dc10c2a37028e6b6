"""Softmax over logits that come in blocks and are never held all at once.

A `SoftmaxState` has four numbers per token. It summarizes the blocks seen so far, and the states of
several ranks can be combined (Milakov and Gimelshein, arXiv:1805.02867). From the final state, the
gradient of each block follows from the block's logits, or from its `Weights`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny
"""The smallest weight: a weight that underflowed to 0 counts as this, so that it has a log."""

SoftmaxState = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of some logits x / temperature, float32 [S] each:

- peak: the largest
- total: sum of exp(x - peak)
- expected: sum of exp(x - peak) (x - peak)
- chosen: the target's logit, 0 if it is not among them
"""


@dataclass(frozen=True)
class Weights:
    """A block's unnormalized probabilities, relative to the largest logit up to the block."""

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
    """The state after the block ``logits``.

    Args:
        local: the target's column in the block; outside of it if the target is not in the block
        weights: filled with the values of the block's `Weights`; their peak is the result's
    """
    scores = logits.float() / temperature
    peak = torch.maximum(state[0], scores.amax(-1))
    shifted = scores - peak.unsqueeze(1)
    exponentials = shifted.exp()
    if weights is not None:
        weights.copy_(exponentials)
    total, expected = _relative_to(peak, state)
    inside = (local >= 0) & (local < scores.shape[1])
    chosen = scores.gather(1, local.clamp(0, scores.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return (
        peak,
        total + exponentials.sum(-1),
        expected + (exponentials * shifted).sum(-1),
        state[3] + torch.where(inside, chosen, 0.0),
    )


def _relative_to(peak: Tensor, state: SoftmaxState) -> tuple[Tensor, Tensor]:
    """``total`` and ``expected`` of a state, relative to ``peak``, which is at least its own."""
    lower = state[0] - peak
    scale = lower.exp()
    return state[1] * scale, (state[2] + state[1] * lower) * scale


def over_ranks(state: SoftmaxState, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, peak, log of total, and entropy, over all ranks of ``group``.  # [S] each"""
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
        block: its logits, or the weights that were kept of them
        softmax: what `over_ranks` returns after the log-probability
        grads: of log-probability and entropy  # [S] each
    """
    peak, log_total, entropy = (values.unsqueeze(1) for values in softmax)
    grad_logprob, grad_entropy = (values.unsqueeze(1) for values in grads)
    if isinstance(block, Weights):
        scores = block.values.float().clamp_min(TINY).log() + block.peak.unsqueeze(1)
    else:
        scores = block.float() / temperature
    log_p = scores - peak - log_total
    columns = torch.arange(scores.shape[1], device=scores.device)
    # d logprob / d logit_j = [j = target] - p_j; d entropy / d logit_j = -p_j (log p_j + entropy)
    grad = torch.where(columns == local.unsqueeze(1), grad_logprob, 0.0)
    grad = grad - log_p.exp() * (grad_logprob + grad_entropy * (log_p + entropy))
    return (grad / temperature).to(dtype)
