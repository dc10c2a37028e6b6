"""Mismatch between the log-probabilities of the trainer and of the rollout engine.

d = log pi_train - log pi_rollout of a sampled token. d, and its sum over a sequence, are clamped to
[-20, 20], so that one token cannot overflow the exponentials. Pure torch, no gradient, float64.
Formulas: `rltrain.tracking.catalogue`.
"""

import torch
from torch import Tensor

from rltrain.algorithms.kl import MAX_LOG_RATIO
from rltrain.algorithms.sequences import require_finite, sequence_mean, sequence_sum


@torch.no_grad()
def mismatch_metrics(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    flipped: Tensor | None = None,
    *,
    area: str = "mismatch",
) -> dict[str, float]:
    """The ``mismatch/`` metrics of one batch, named under ``area``.

    Args:
        logprobs: of the trainer, per token.  # [N]
        rollout_logprobs: of the engine, at sampling.  # [N]
        mask: bool, True on the response tokens to compare.  # [N]
        seq_lens: int64  # [B]
        flipped: bool, True where a route flip can change the log-probability of the token. None: it
            was not measured, and its metrics are left out.  # [N]

    Raises:
        ValueError: shapes that differ, an empty mask, or a NaN or infinity under the mask.
    """
    diff = clamped_log_ratio(logprobs, rollout_logprobs, mask, seq_lens)
    if not bool(mask.any()):
        raise ValueError("mismatch metrics need at least one response token: the mask is all False")
    values = {
        **_divergences(diff[mask]),
        **_differences(diff[mask].abs()),
        **_probabilities(logprobs[mask].double().exp(), rollout_logprobs[mask].double().exp()),
        **_sequences(logprobs, rollout_logprobs, diff, mask, seq_lens),
        "num_tokens": mask.sum(),
    }
    if flipped is not None:
        _require_mask("flipped", flipped, mask)
        reached = diff[flipped & mask].abs()
        values["num_flipped"] = torch.tensor(len(reached))
        if len(reached):
            values["abs_diff_median_flipped"] = _median(reached)
    return {f"{area}/{name}": float(value) for name, value in values.items()}


@torch.no_grad()
def k3_by_age(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, seq_lens: Tensor, ages: Tensor
) -> dict[str, float]:
    """``mismatch/k3`` of the tokens of each age. Weighted by their numbers, they sum to it.

    Args:
        ages: int64, how many steps the policy is ahead of the weights that sampled a token.  # [N]

    Raises:
        ValueError: shapes that differ, or a NaN or infinity under the mask.
    """
    diff = clamped_log_ratio(logprobs, rollout_logprobs, mask, seq_lens)
    k3 = diff.expm1() - diff
    return {
        f"mismatch/k3/age_{age}": float(k3[mask & (ages == age)].mean())
        for age in ages[mask].unique().tolist()
    }


def clamped_log_ratio(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, seq_lens: Tensor
) -> Tensor:
    """d of each masked token, 0 elsewhere, in float64.  # [N]

    Raises:
        ValueError: shapes that differ, or a NaN or infinity under the mask.
    """
    shapes = {
        "logprobs": tuple(logprobs.shape),
        "rollout_logprobs": tuple(rollout_logprobs.shape),
        "mask": tuple(mask.shape),
        "sum of seq_lens": (int(seq_lens.sum()),),
    }
    if len(set(shapes.values())) > 1:
        raise ValueError(f"log-probabilities to compare need one shape [N] for all, got {shapes}")
    _require_mask("mask", mask, mask)
    require_finite("logprobs", logprobs, mask, seq_lens)
    require_finite("rollout_logprobs", rollout_logprobs, mask, seq_lens)
    diff = (logprobs.double() - rollout_logprobs.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(mask, diff, 0.0)


def _divergences(diff: Tensor) -> dict[str, Tensor]:
    """Divergence estimates from the rollout's samples. For KL and JS: f(rho), f(1) = f'(1) = 0."""
    rho = diff.exp()
    log_mean = (diff.expm1() / 2).log1p()  # log of (the mean of both policies / the rollout's)
    return {
        "k1": -diff.mean(),
        "k3": (diff.expm1() - diff).mean(),
        "reverse_k3": ((-diff).expm1() + diff).mean(),
        "js": (rho * diff - (1 + rho) * log_mean).mean() / 2,
        "rho_mean": rho.mean(),
        "chi2_token": (2 * diff).expm1().mean(),
    }


def _differences(distance: Tensor) -> dict[str, Tensor]:
    return {
        "abs_diff_mean": distance.mean(),
        "abs_diff_std": distance.std(unbiased=False),
        "abs_diff_p99": distance.kthvalue(-(-99 * len(distance) // 100)).values,
        "abs_diff_max": distance.max(),
        "mult_prob_error": distance.exp().mean(),
    }


def _probabilities(probs: Tensor, rollout_probs: Tensor) -> dict[str, Tensor]:
    distance = (probs - rollout_probs).abs()
    values = {
        "prob_diff_mean": distance.mean(),
        "prob_diff_std": distance.std(unbiased=False),
        "prob_diff_max": distance.max(),
    }
    if probs.min() < probs.max() and rollout_probs.min() < rollout_probs.max():
        values["prob_correlation"] = torch.corrcoef(torch.stack([probs, rollout_probs]))[0, 1]
    return values


def _sequences(
    logprobs: Tensor, rollout_logprobs: Tensor, diff: Tensor, mask: Tensor, seq_lens: Tensor
) -> dict[str, Tensor]:
    """Means over sequences with a masked token, and the worst sequence."""
    present = sequence_sum(mask.double(), seq_lens) > 0
    log_ppl = -sequence_mean(logprobs.double(), mask, seq_lens)[present]
    rollout_log_ppl = -sequence_mean(rollout_logprobs.double(), mask, seq_lens)[present]
    log_ppl_diff = -sequence_mean(diff, mask, seq_lens)[present]
    products = sequence_sum(diff, seq_lens)[present].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    distance = torch.where(present, sequence_mean(diff.abs(), mask, seq_lens), -1.0)
    return {
        "ppl": log_ppl.exp().mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "log_ppl": log_ppl.mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "ppl_ratio": log_ppl_diff.exp().mean(),
        "log_ppl_diff_mean": log_ppl_diff.mean(),
        "log_ppl_diff_abs_mean": log_ppl_diff.abs().mean(),
        "log_ppl_diff_max": log_ppl_diff.max(),
        "log_ppl_diff_min": log_ppl_diff.min(),
        "chi2_sequence": (2 * products).expm1().mean(),
        "worst_sequence": distance.argmax(),
        "worst_sequence_abs_diff": distance.max(),
    }


def _median(values: Tensor) -> Tensor:
    """The mean of the two middle values where the count is even, which torch.median is not."""
    ordered, middle = values.sort().values, len(values) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2


def _require_mask(name: str, checked: Tensor, mask: Tensor) -> None:
    if checked.dtype != torch.bool or checked.shape != mask.shape:
        raise ValueError(
            f"{name}: expected bool of shape {tuple(mask.shape)}, found {checked.dtype} of shape "
            f"{tuple(checked.shape)}"
        )
