"""What the controller computes on a batch between two calls to its actors. Pure."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rltrain.algorithms.advantages import find_advantage
from rltrain.algorithms.advantages.advantage_inputs import AdvantageInputs, require_advantages
from rltrain.algorithms.correction import correct
from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.reduce import loss_weights
from rltrain.algorithms.sequences import sequence_of, sequence_sum
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.algorithm import AlgorithmConfig, CorrectionConfig, OverlongConfig
from rltrain.config.routing import RoutingReplayConfig
from rltrain.controller.step_metrics import advantage_metrics
from rltrain.data.packing import mini_batch_sizes
from rltrain.policy.types import Agreement
from rltrain.routing.fallback import batch_share, check_budget, missing_rows, surviving_tokens


def with_rewards(
    batch: Batch, rewards: Sequence[float | None], *, shuffle_seed: int | None = None
) -> Batch:
    """Fill ``rewards`` and ``loss_mask``; a sequence whose reward failed leaves the loss.

    Args:
        rewards: one a sequence, None where the reward function failed or timed out
        shuffle_seed: permute the rewards over the batch, for a control that must not learn
    """
    values = torch.tensor([torch.nan if r is None else r for r in rewards], dtype=torch.float64)
    if shuffle_seed is not None:
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(shuffle_seed))
        values = values[order]
    scored = values.isfinite()
    return batch.with_fields(
        rewards=values.float(),
        loss_mask=batch.response_mask & scored.repeat_interleave(batch.seq_lens),
    )


def with_fallback(
    batch: Batch, replay: RoutingReplayConfig, samples: Sequence[str]
) -> tuple[Batch, dict[str, float]]:
    """Take out of ``loss_mask`` what missing routes cost; the rest of the policy is the workers'.

    Args:
        samples: how an error names each sequence

    Raises:
        ValueError, RuntimeError: as `rltrain.routing.fallback.check_budget`
    """
    loss_mask, route_mask = batch.require("loss_mask", "route_mask")
    missing = missing_rows(route_mask, batch.seq_lens)
    check_budget(missing, batch.seq_lens, samples, replay.fallback, replay.max_batch_fallback)
    survives = surviving_tokens(
        missing, batch.seq_lens, replay.fallback, replay.max_sample_fallback
    )
    metrics = {
        "routing/fallback_fraction": batch_share(missing, batch.seq_lens),
        "routing/fallback_dropped_fraction": float((loss_mask & ~survives).sum())
        / max(1, int(loss_mask.sum())),
    }
    return batch.with_fields(loss_mask=loss_mask & survives), metrics


def without_older_routes(
    batch: Batch, token_ages: Tensor, max_age: int
) -> tuple[Batch, dict[str, float]]:
    """Take rows out of ``route_mask`` whose experts were chosen by weights that are more than
    ``max_age`` steps old. A row's weights are those that sampled the token after it.

    Args:
        token_ages: of the weights that sampled each token, in steps  # [N]
    """
    (route_mask,) = batch.require("route_mask")
    older = token_ages.roll(-1) > max_age  # the last row of a sequence owes no route
    metrics = {
        "routing/older_fraction": float((route_mask & older).sum()) / max(1, int(route_mask.sum()))
    }
    return batch.with_fields(route_mask=route_mask & ~older), metrics


def with_correction(batch: Batch, correction: CorrectionConfig) -> tuple[Batch, dict[str, float]]:
    """Weigh, or take out of ``loss_mask``, what trainer and engine disagree about."""
    if not correction.active:
        return batch, {}
    old, rollout, mask = batch.require("old_logprobs", "rollout_logprobs", "loss_mask")
    corrected = correct(old, rollout, mask, batch.seq_lens, correction)
    batch = batch.with_fields(loss_mask=corrected.mask, correction_weights=corrected.weights)
    return batch, corrected.metrics


def with_token_rewards(
    batch: Batch, algorithm: AlgorithmConfig, max_response_tokens: int, kl_coef: float
) -> tuple[Batch, dict[str, float]]:
    """Fill ``token_rewards``: the reward less the overlong penalty at a response's last token, and
    where KL is part of the reward, less that at every token."""
    (rewards,) = batch.require("rewards")
    lengths = sequence_sum(batch.response_mask.double(), batch.seq_lens)
    shaped = rewards - overlong_penalty(lengths, algorithm.overlong, max_response_tokens)
    position = torch.where(batch.response_mask, torch.arange(batch.num_tokens), -1)
    last = torch.full_like(batch.seq_lens, -1).scatter_reduce(
        0, sequence_of(batch.seq_lens), position, "amax"
    )
    token_rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
    token_rewards[last[last >= 0]] = shaped[last >= 0]
    if batch.ref_logprobs is not None and algorithm.kl.where == "reward":
        old, ref = batch.require("old_logprobs", "ref_logprobs")
        kl = kl_estimate(old.double(), ref.double(), algorithm.kl.estimator)
        token_rewards -= torch.where(batch.response_mask, kl_coef * kl, 0.0)
    metrics, scored = {}, shaped[shaped.isfinite()]
    if algorithm.overlong.buffer_tokens and len(scored):
        metrics["reward/shaped_mean"] = float(scored.mean())
    return batch.with_fields(token_rewards=token_rewards), metrics


def overlong_penalty(lengths: Tensor, overlong: OverlongConfig, limit: int) -> Tensor:
    """0 up to ``limit - buffer_tokens`` response tokens, then linear to ``penalty`` at ``limit``
    (DAPO, arXiv:2503.14476, equation 13, negated).  # [B] -> [B]"""
    if overlong.buffer_tokens == 0:
        return torch.zeros_like(lengths)
    over = lengths - (limit - overlong.buffer_tokens)
    return overlong.penalty * (over / overlong.buffer_tokens).clamp(0, 1)


def with_signal(batch: Batch, config: Config, kl_coef: float) -> tuple[Batch, dict[str, float]]:
    """Fill what a step learns from, once all passes were made: of every token its advantage, and
    its weight in the loss."""
    batch, corrected = with_correction(batch, config.algorithm.correction)
    limit = config.rollout.max_response_tokens
    batch, shaped = with_token_rewards(batch, config.algorithm, limit, kl_coef)
    batch, advantages = with_advantages(batch, config)
    return batch, corrected | shaped | advantages


def policy_fields(batch: Batch) -> dict[str, Tensor]:
    """What an update of the policy takes of a batch."""
    names = ["old_logprobs", "advantages", "loss_weights"]
    optional = ("ref_logprobs", "correction_weights")
    names += [name for name in optional if getattr(batch, name) is not None]
    return dict(zip(names, batch.require(*names), strict=True))


def critic_fields(batch: Batch) -> dict[str, Tensor]:
    """What an update of the critic takes of a batch."""
    names = "values", "returns", "loss_weights"
    return dict(zip(names, batch.require(*names), strict=True))


def with_advantages(batch: Batch, config: Config) -> tuple[Batch, dict[str, float]]:
    """Fill ``advantages``, ``returns`` where values are learned, and ``loss_weights``."""
    algorithm = config.algorithm
    rewards, token_rewards, loss_mask = batch.require("rewards", "token_rewards", "loss_mask")
    (group_ids,) = batch.require("group_ids")
    scored = rewards.isfinite().repeat_interleave(batch.seq_lens) & batch.response_mask
    inputs = AdvantageInputs(
        rewards=rewards,
        token_rewards=token_rewards,
        seq_lens=batch.seq_lens,
        group_ids=group_ids,
        mask=scored,
        values=batch.values,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )
    estimate = find_advantage(algorithm.advantage).estimate
    estimated = require_advantages(estimate(inputs), inputs, algorithm.advantage)
    if algorithm.overlong.mask:
        (truncated,) = batch.require("truncated")
        loss_mask = loss_mask & ~truncated.repeat_interleave(batch.seq_lens)
    batch = batch.with_fields(
        advantages=estimated.advantages, returns=estimated.returns, loss_mask=loss_mask
    )
    return with_loss_weights(batch, config), advantage_metrics(estimated.advantages[loss_mask])


def with_loss_weights(batch: Batch, config: Config) -> Batch:
    """Fill ``loss_weights`` from ``loss_mask``, by the denominator of each mini-batch."""
    (loss_mask,) = batch.require("loss_mask")
    lens = batch.seq_lens.split(mini_batch_sizes(batch.num_sequences, config.trainer.mini_batches))
    masks = loss_mask.split([int(part.sum()) for part in lens])
    aggregation, limit = config.algorithm.aggregation, config.rollout.max_response_tokens
    weights = [
        loss_weights(mask, part, aggregation, limit) for mask, part in zip(masks, lens, strict=True)
    ]
    return batch.with_fields(loss_weights=torch.cat(weights))


def check_overlap(
    agreement: Agreement, experts_per_token: int, num_experts: int, min_overlap: float
) -> None:
    """The gate on meaning: well-formed routes of other tokens, layers or weights stop here.

    A mean over all captured rows of a layer: it sees what is wrong with many of them.

    Raises:
        RuntimeError: naming the first layer whose overlap is below ``min_overlap``.
    """
    owed = agreement.num_rows * experts_per_token
    for layer, count in agreement.shared.items():
        if count < min_overlap * owed:
            raise RuntimeError(
                f"layer {layer}: native routing shares {count / owed:.3f} of the experts that were "
                f"captured in the rollout, expected routing_replay.min_overlap={min_overlap} or "
                f"more (chance is {experts_per_token / num_experts:.3f}). The routes are not those "
                "of these tokens, this layer or these weights"
                " [RL5002]"
            )
