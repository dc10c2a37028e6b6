"""Contribution of one micro-batch to the objective, and to the sums of its metrics."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import find_loss
from rltrain.algorithms.losses.loss_inputs import LossInputs, TokenLoss, require_token_loss
from rltrain.algorithms.reduce import weighted_sum
from rltrain.config.algorithm import AlgorithmConfig

RATIO_STEPS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.5, 2.0)
"""Thresholds of a token's absolute log ratio. Tokens beyond each of them are counted."""


@dataclass(frozen=True)
class Sums:
    """Sums and maxima over tokens. Unlike means, they combine over micro-batches and ranks."""

    totals: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True)
class Targets:
    """Values of a micro-batch's tokens that the controller computed.  # [S] each"""

    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor  # loss weights; 0 for prompt, padding and filtered tokens
    ref_logprobs: Tensor | None = None
    correction_weights: Tensor | None = None  # importance weights, only of the policy loss


def policy_objective(
    logprobs: Tensor,
    entropy: Tensor,
    targets: Targets,
    *,
    sequence_mean: Callable[[Tensor], Tensor],
    config: AlgorithmConfig,
    kl_coef: float,
) -> tuple[Tensor, Sums]:
    """The policy loss, plus KL to the reference, minus the entropy bonus, with the same token
    weights.

    Args:
        logprobs, entropy: of the current policy, with gradient  # [S]
        sequence_mean: see `LossInputs`
        kl_coef: current coefficient of the KL in the loss

    Returns:
        This micro-batch's share of the loss (scalar), and its sums.
    """
    weights, counted = targets.weights, targets.weights != 0
    logprobs, entropy = _where(counted, logprobs), _where(counted, entropy)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=_where(counted, targets.old_logprobs),
        advantages=_where(counted, targets.advantages),
        mask=counted,
        sequence_mean=sequence_mean,
        config=config,
    )
    token_loss = require_token_loss(find_loss(config.loss)(inputs), inputs)
    corrected = token_loss.loss
    if targets.correction_weights is not None:
        corrected = _where(counted, targets.correction_weights) * token_loss.loss
    policy_loss = loss = weighted_sum(weights, corrected)
    totals = _token_values(token_loss, inputs, entropy)
    if targets.ref_logprobs is not None:
        ref_logprobs = _where(counted, targets.ref_logprobs)
        ref_kl = kl_estimate(logprobs, ref_logprobs, config.kl.estimator)
        totals["ref_kl"] = ref_kl
        if config.kl.where == "loss":
            loss = loss + kl_coef * weighted_sum(weights, ref_kl)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * weighted_sum(weights, entropy)
    sums = {"loss": loss.detach(), "policy_loss": policy_loss.detach()}
    ratio = token_loss.ratio.detach()
    return loss, Sums(
        totals=sums | {name: _total(counted, x) for name, x in totals.items()},
        maxima={
            "ratio_max": _where(counted, ratio).amax(),
            # The maximum of the negated ratio, so that all extremes are maxima.
            "ratio_min": torch.where(counted, -ratio, -torch.inf).amax(),
            "entropy_max": entropy.detach().amax(),
        },
    )


def _token_values(token_loss: TokenLoss, inputs: LossInputs, entropy: Tensor) -> dict[str, Tensor]:
    """What the metrics sum over tokens.  # [S] each"""
    log_r = inputs.log_ratio.detach()
    return {
        "tokens": inputs.mask,
        "ratio": token_loss.ratio,
        "kl": log_r.expm1() - log_r,
        "entropy": entropy,
        # NaN counts as beyond all thresholds.
        **{
            f"ratio_beyond/{x:g}": ~(token_loss.ratio.detach().log().abs() <= x)
            for x in RATIO_STEPS
        },
        **{f"stat/{name}": value for name, value in token_loss.stats.items()},
    }


def sft_objective(logprobs: Tensor, *, weights: Tensor) -> tuple[Tensor, Sums]:
    """Negative log-likelihood of the weighted tokens.  # [S], [S] -> scalar"""
    counted = weights != 0
    loss = weighted_sum(weights, -logprobs)
    totals = {"tokens": counted, "nll": -logprobs}
    return loss, Sums(
        totals={"loss": loss.detach()} | {name: _total(counted, x) for name, x in totals.items()},
        maxima={},
    )


def value_objective(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    clip: float | None,
) -> tuple[Tensor, Sums]:
    """``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``, weighted like the policy's.

    The clip is that of PPO's reference code (openai/baselines ``ppo2/model.py``).

    Args:
        values: with gradient  # [S]
        old_values: values before the update  # [S]
        returns: targets of the values  # [S]

    Returns:
        This micro-batch's share of the loss (scalar), and its sums.
    """
    counted, clipped = weights != 0, torch.zeros_like(weights, dtype=torch.bool)
    values = _where(counted, values)
    loss = (values - returns).square() / 2
    if clip is not None:
        # Clamp the values, not their difference: its rounding would count as clipped.
        moved = values.clamp(old_values - clip, old_values + clip)
        bounded = (moved - returns).square() / 2
        clipped = bounded > loss
        loss = torch.maximum(loss, bounded)
    total = weighted_sum(weights, loss)
    totals = {"tokens": counted, "clipped": clipped}
    return total, Sums(
        totals={"loss": total.detach()} | {name: _total(counted, x) for name, x in totals.items()},
        maxima={},
    )


def _where(counted: Tensor, values: Tensor) -> Tensor:
    """``values``, and 0 where a token is not counted. A weight of 0 is not enough: the gradient
    through exp or a square would be 0 times NaN.  # [S], [S] -> [S]"""
    return torch.where(counted, values, 0.0)


def _total(counted: Tensor, values: Tensor) -> Tensor:
    return _where(counted, values.detach().float()).sum()
