"""What one micro-batch adds to the objective, and to the sums behind its metrics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import clipped_surrogate, importance_ratio, is_clipped
from rltrain.algorithms.reduce import weighted_sum
from rltrain.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class Sums:
    """Sums and maxima over tokens: they add up over micro-batches and ranks, means do not."""

    totals: dict[str, Tensor]
    maxima: dict[str, Tensor]


def grpo_objective(
    logprobs: Tensor,
    entropy: Tensor,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    config: AlgorithmConfig,
) -> tuple[Tensor, Sums]:
    """Clipped surrogate, plus KL to the reference, minus entropy bonus, each weighted alike.

    Args:
        logprobs, entropy: of the current policy, with gradient  # [S]
        old_logprobs, ref_logprobs, advantages: of the same tokens  # [S]
        weights: what each token counts; 0 for prompt, padding and filtered tokens  # [S]

    Returns:
        This micro-batch's share of the loss (scalar), and its sums.
    """
    ratio = importance_ratio(logprobs, old_logprobs)
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    loss = weighted_sum(weights, clipped_surrogate(ratio, advantages, **clip))
    counted = weights != 0
    totals = {
        "tokens": counted,
        "ratio": ratio,
        "clipped": is_clipped(ratio, advantages, **clip),
        "kl": ratio - 1 - ratio.log(),
        "entropy": entropy,
    }
    if ref_logprobs is not None:
        ref_kl = kl_estimate(logprobs, ref_logprobs, config.kl_estimator)
        loss = loss + config.kl_coef * weighted_sum(weights, ref_kl)
        totals["ref_kl"] = ref_kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * weighted_sum(weights, entropy)
    return loss, Sums(
        totals={"loss": loss.detach()} | {name: _total(counted, x) for name, x in totals.items()},
        maxima={"ratio_max": torch.where(counted, ratio.detach(), 0.0).amax()},
    )


def sft_objective(logprobs: Tensor, *, weights: Tensor) -> tuple[Tensor, Sums]:
    """Negative log-likelihood of the weighted tokens.  # [S], [S] -> scalar"""
    loss = weighted_sum(weights, -logprobs)
    return loss, Sums(
        totals={"loss": loss.detach(), "tokens": _total(weights != 0, weights != 0)}, maxima={}
    )


def _total(counted: Tensor, values: Tensor) -> Tensor:
    return torch.where(counted, values.detach().float(), 0.0).sum()
