"""What is done about rho = pi_old / pi_rollout: importance weights, rejection and veto.

The rollout engine sampled from pi_rollout, the trainer differentiates pi, and pi_old is what the
trainer computed before the update. The loss has the ratio pi / pi_old; rho is what it lacks. Log
ratios of tokens, and sums of them, are clamped to [-20, 20]. Pure torch, no gradient, float64.
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
    weights: Tensor  # float32, of the policy loss; 1 where nothing is to be corrected  # [N]
    mask: Tensor  # bool, what is left of the mask  # [N]
    metrics: dict[str, float]  # ``correction/``, over the mask as it was given


@torch.no_grad()
def correct(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    config: CorrectionConfig,
) -> Correction:
    """Weigh tokens by rho, and take out those that are too far off.

    TIS is a token's rho truncated (Yao et al. 2025, fengyao.notion.site/off-policy-rl); MIS masks
    instead, of a sequence's product, and the geometric form is from there, too (Liu et al. 2025,
    richardli.xyz/rl-collapse); IcePop masks a token's rho on both sides (arXiv:2510.18855, section
    2.3.2). A weight of 0 leaves its token in the denominator of the loss; rejection and veto take
    it out of ``mask``, and so out of the denominator.

    Args:
        old_logprobs, rollout_logprobs: of each token.  # [N]
        mask: bool, the response tokens of the step that are in the loss.  # [N]
        seq_lens: int64  # [B]

    Raises:
        ValueError: shapes that differ, or a NaN or infinity under the mask.
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
    """What the bounds apply to, of each token.  # [N]"""
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
    """Weights between the bounds, 1 off the mask, and what that took.  # [N] -> [N]"""
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
    """Of the weights as the loss has them."""
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
    """The share of the given tokens, and of sequences with one of them, in the mask's."""
    hit, present = (sequence_sum(m.double(), seq_lens) > 0 for m in (tokens, mask))
    return {
        f"{name}_token_fraction": int(tokens.sum()) / int(mask.sum()),
        f"{name}_sequence_fraction": int(hit.sum()) / int(present.sum()),
    }
