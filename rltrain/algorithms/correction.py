"""Correction of rho = pi_old / pi_rollout: importance weights, rejection and veto.

The rollout engine samples from pi_rollout. The trainer computes pi_old before the update, and
differentiates pi. The loss contains the ratio pi / pi_old, but not rho. Log ratios of tokens, and
their sums, are clamped to [-20, 20]. Pure torch, no gradient, float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.kl import MAX_LOG_RATIO
from rltrain.algorithms.mismatch import clamped_log_ratio
from rltrain.algorithms.sequences import sequence_mean, sequence_of, sequence_sum
from rltrain.config.algorithm import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    weights: Tensor  # float32, weights of the policy loss; 1 without correction  # [N]
    mask: Tensor  # bool, the mask without rejected tokens  # [N]
    metrics: dict[str, float]  # ``correction/``, over the input mask


@torch.no_grad()
def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    config: CorrectionConfig,
) -> Correction:
    """Weight tokens by rho, and reject those whose rho is out of bounds.

    TIS truncates rho of tokens (Yao et al. 2025, fengyao.notion.site/off-policy-rl). MIS masks
    sequences by the product of rho; the geometric form is from the same source (Liu et al. 2025,
    richardli.xyz/rl-collapse). IcePop masks rho of tokens on both sides (arXiv:2510.18855, section
    2.3.2). A token with weight 0 stays in the denominator of the loss. Rejection and veto remove it
    from ``mask``, and so from the denominator.

    Args:
        old_logprobs, rollout_logprobs: per token.  # [N]
        mask: bool, the response tokens of the step that are in the loss.  # [N]
        seq_lens: int64  # [B]

    Raises:
        ValueError: the shapes differ, or there is NaN or infinity under the mask.
    """
    log_rho = clamped_log_ratio(old_logprobs, rollout_logprobs, mask, seq_lens)
    weights, kept = torch.ones_like(log_rho), mask
    metrics: dict[str, float] = {}
    if not bool(mask.any()):
        return Correction(weights.float(), kept, metrics)
    if config.weight != "none":
        raw = _ratio(log_rho, mask, seq_lens, config.weight)
        weights, bound_metrics = _bounded(raw, mask, config)
        metrics |= bound_metrics | _weight_metrics(weights, mask, seq_lens)
    if config.reject != "none":
        raw = _ratio(log_rho, mask, seq_lens, config.reject)
        rejected = mask & ~((raw >= config.reject_min) & (raw <= config.reject_max))
        metrics |= _share("reject", rejected, mask, seq_lens)
        kept = kept & ~rejected
    if config.veto > 0:
        hopeless = mask & (log_rho.exp() < config.veto)
        metrics |= _share("veto", hopeless, mask, seq_lens)
        kept = kept & ~(sequence_sum(hopeless.double(), seq_lens) > 0)[sequence_of(seq_lens)]
    return Correction(weights.float(), kept, {f"correction/{k}": v for k, v in metrics.items()})


def _ratio(log_rho: Tensor, mask: Tensor, seq_lens: Tensor, form: str) -> Tensor:
    """The ratio of each token to which the bounds apply.  # [N]"""
    if form == "token":
        return log_rho.exp()
    if form == "sequence":
        sums = sequence_sum(log_rho, seq_lens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratios = sums.exp()
    elif form == "geometric":
        ratios = sequence_mean(log_rho, mask, seq_lens).exp()
    else:
        assert form == "k3"
        ratios = sequence_mean(log_rho.expm1() - log_rho, mask, seq_lens)
    return ratios[sequence_of(seq_lens)]


def _bounded(
    raw: Tensor, mask: Tensor, config: CorrectionConfig
) -> tuple[Tensor, dict[str, float]]:
    """Weights within the bounds, 1 off the mask, and their metrics.  # [N] -> [N]"""
    low, high = raw < config.weight_min, raw > config.weight_max
    if config.outside == "truncate":
        weights = raw.clamp(config.weight_min, config.weight_max)
    else:
        weights = torch.where(low | high, 0.0, raw)
    metrics = {
        "fraction_low": float(low[mask].double().mean()),
        "fraction_high": float(high[mask].double().mean()),
    }
    if config.normalize:
        mean = weights[mask].mean()
        metrics["normalization"] = float(mean)
        weights = weights / torch.where(mean > 0, mean, 1.0)  # all are 0 where the mean is
    return torch.where(mask, weights, 1.0), metrics


def _weight_metrics(weights: Tensor, mask: Tensor, seq_lens: Tensor) -> dict[str, float]:
    """Metrics of the weights that the loss uses."""
    present = sequence_sum(mask.double(), seq_lens) > 0
    tokens, sequences = weights[mask], sequence_mean(weights, mask, seq_lens)[present]
    squares = float(tokens.square().mean())
    return {
        **_spread("weight", tokens),
        **_spread("sequence_weight", sequences),
        "sequence_weight_max_deviation": float((sequences - 1).abs().max()),
        "effective_sample_size": float(tokens.mean()) ** 2 / squares if squares else 0.0,
    }


def _spread(name: str, values: Tensor) -> dict[str, float]:
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_std": float(values.std(unbiased=False)),
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }


def _share(name: str, tokens: Tensor, mask: Tensor, seq_lens: Tensor) -> dict[str, float]:
    """Share of ``tokens`` in the masked tokens, and of their sequences in the masked sequences."""
    hit, present = (sequence_sum(m.double(), seq_lens) > 0 for m in (tokens, mask))
    return {
        f"{name}_token_fraction": int(tokens.sum()) / int(mask.sum()),
        f"{name}_sequence_fraction": int(hit.sum()) / int(present.sum()),
    }
