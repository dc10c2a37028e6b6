"""What the controller computes on a batch between two calls to its actors. Pure."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rltrain.algorithms.advantages import find_advantage
from rltrain.algorithms.advantages.inputs import AdvantageInputs
from rltrain.algorithms.correction import correct
from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.reduce import loss_weights
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.algorithm import AlgorithmConfig, CorrectionConfig, OverlongConfig
from rltrain.config.routing import RoutingReplayConfig
from rltrain.data.packing import mini_batch_sizes
from rltrain.policy.types import NO_FLIP, Agreement, Updated
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


def with_correction(batch: Batch, correction: CorrectionConfig) -> tuple[Batch, dict[str, float]]:
    """Weigh, or take out of ``loss_mask``, what trainer and engine disagree about."""
    if not correction.active:
        return batch, {}
    old, rollout, mask = batch.require("old_logprobs", "rollout_logprobs", "loss_mask")
    found = correct(old, rollout, mask, batch.seq_lens, correction)
    batch = batch.with_fields(loss_mask=found.mask, correction_weights=found.weights)
    return batch, found.metrics


def with_token_rewards(
    batch: Batch, algorithm: AlgorithmConfig, max_response_tokens: int, kl_coef: float
) -> tuple[Batch, dict[str, float]]:
    """Fill ``token_rewards``: the reward less the overlong penalty at a response's last token, and
    where KL is part of the reward, less that at every token."""
    (rewards,) = batch.require("rewards")
    lengths = per_sequence_sum(batch.response_mask.double(), batch.seq_lens)
    shaped = rewards - overlong_penalty(lengths, algorithm.overlong, max_response_tokens)
    sequence = torch.arange(batch.num_sequences).repeat_interleave(batch.seq_lens)
    position = torch.where(batch.response_mask, torch.arange(batch.num_tokens), -1)
    last = torch.full_like(batch.seq_lens, -1).scatter_reduce(0, sequence, position, "amax")
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


def with_advantages(batch: Batch, config: Config) -> tuple[Batch, dict[str, float]]:
    """Fill ``advantages``, ``returns`` where values are learned, and ``loss_weights``, whose
    denominator is each mini-batch's own."""
    algorithm = config.algorithm
    rewards, token_rewards, loss_mask = batch.require("rewards", "token_rewards", "loss_mask")
    (group_ids,) = batch.require("group_ids")
    scored = rewards.isfinite().repeat_interleave(batch.seq_lens) & batch.response_mask
    found = find_advantage(algorithm.advantage).estimate(
        AdvantageInputs(
            rewards=rewards,
            token_rewards=token_rewards,
            seq_lens=batch.seq_lens,
            group_ids=group_ids,
            mask=scored,
            values=batch.values,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
        )
    )
    if algorithm.overlong.mask:
        (truncated,) = batch.require("truncated")
        loss_mask = loss_mask & ~truncated.repeat_interleave(batch.seq_lens)
    sizes = mini_batch_sizes(batch.num_sequences, config.trainer.mini_batches)
    lens = batch.seq_lens.split(sizes)
    limit = config.rollout.max_response_tokens
    weights = [
        loss_weights(mask, part, algorithm.aggregation, limit)
        for mask, part in zip(
            loss_mask.split([int(part.sum()) for part in lens]), lens, strict=True
        )
    ]
    batch = batch.with_fields(
        advantages=found.advantages,
        returns=found.returns,
        loss_mask=loss_mask,
        loss_weights=torch.cat(weights),
    )
    return batch, advantage_metrics(found.advantages[loss_mask])


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Of the tokens in the loss; nothing where there are none."""
    if not len(advantages):
        return {}
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(unbiased=False)),
        "advantage/min": float(advantages.min()),
        "advantage/max": float(advantages.max()),
    }


def reward_metrics(batch: Batch, num_timeouts: int) -> dict[str, float]:
    """Of the sequences that have a reward; where none has, the shares of those alone."""
    rewards, groups = batch.require("rewards", "group_ids")
    failed = ~rewards.isfinite()
    scored = rewards[~failed]
    by_group = [rewards[groups == g] for g in groups.unique()]
    by_group = [g[g.isfinite()] for g in by_group]
    by_group = [g for g in by_group if len(g)]
    failures = {
        "reward/failed_fraction": (int(failed.sum()) - num_timeouts) / len(rewards),
        "reward/timeout_fraction": num_timeouts / len(rewards),
    }
    if not by_group:
        return failures
    return failures | {
        "reward/mean": float(scored.mean()),
        "reward/std": float(scored.std(unbiased=False)),
        "group/zero_std_fraction": _share(by_group, lambda g: bool(g.min() == g.max())),
        "group/all_correct_fraction": _share(by_group, lambda g: bool(g.min() >= 1)),
        "group/all_wrong_fraction": _share(by_group, lambda g: bool(g.max() <= 0)),
    }


def _share(groups: Sequence[Tensor], holds: Callable[[Tensor], bool]) -> float:
    return sum(map(holds, groups)) / len(groups)


def rollout_metrics(batch: Batch) -> dict[str, float]:
    lengths = per_sequence_sum(batch.response_mask.float(), batch.seq_lens)
    metrics = {
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/num_tokens": float(batch.num_tokens),
        "rollout/num_response_tokens": float(lengths.sum()),
    }
    if batch.truncated is not None:
        metrics["rollout/truncated_fraction"] = float(batch.truncated.float().mean())
    if batch.weight_version is not None:
        metrics["rollout/weight_version"] = float(batch.weight_version.min())
    if isinstance(batch.rollout_expert_indices, tuple):
        owed = batch.num_tokens - batch.num_sequences  # the last token of a sequence owes no route
        refs = batch.rollout_expert_indices
        row_bytes = (
            len(refs[0].layers) * refs[0].experts_per_token * (1 if refs[0].dtype == "uint8" else 2)
        )
        (route_mask,) = batch.require("route_mask")
        metrics["routing/coverage"] = float(route_mask.sum()) / owed
        metrics["routing/bytes_per_token"] = float(row_bytes)
        metrics["routing/host_bytes"] = float(row_bytes * sum(ref.rows for ref in refs))
    return metrics


def per_sequence_sum(values: Tensor, seq_lens: Tensor) -> Tensor:
    """[N] -> [B]"""
    sequence = torch.arange(len(seq_lens)).repeat_interleave(seq_lens)
    return torch.zeros(len(seq_lens), dtype=values.dtype).index_add_(0, sequence, values)


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
            )


def overlap_metrics(agreement: Agreement, experts_per_token: int) -> dict[str, float]:
    """Share of a row's experts that native routing also picks, by layer and by where in its
    sequence the row lies; where rows first differ; the gate weight that replay keeps."""
    if agreement.num_rows == 0:
        return {}
    num_rows, num_layers = agreement.num_rows, len(agreement.shared)
    layers = {n: shared / (num_rows * experts_per_token) for n, shared in agreement.shared.items()}
    parts = {
        part: shared / (rows * num_layers * experts_per_token)
        for part, (rows, shared) in enumerate(
            zip(agreement.part_rows, agreement.part_shared, strict=True)
        )
        if rows
    }
    gates = {layer: mass / num_rows for layer, mass in agreement.gate_mass.items()}
    first = agreement.first_flip[agreement.first_flip != NO_FLIP]
    return {
        "routing/overlap": sum(layers.values()) / num_layers,
        "routing/overlap_min": min(layers.values()),
        **{f"routing/overlap/layer_{layer}": value for layer, value in layers.items()},
        **{f"routing/overlap/part_{part}": value for part, value in parts.items()},
        "routing/gate_mass": sum(gates.values()) / num_layers,
        **{f"routing/gate_mass/layer_{layer}": value for layer, value in gates.items()},
        "routing/differing_row_fraction": len(first) / num_rows,
        **({"routing/first_differing_layer": float(first.float().mean())} if len(first) else {}),
    }


def mismatch_over_entropy(metrics: Mapping[str, float]) -> dict[str, float]:
    """The mismatch in units of what there is to disagree about; nothing without both."""
    k3, entropy = metrics.get("mismatch/k3"), metrics.get("policy/entropy", 0.0)
    return {} if k3 is None or entropy <= 0 else {"policy/mismatch_over_entropy": k3 / entropy}


def load_metrics(load: Mapping[int, Tensor]) -> dict[str, float]:
    """How unevenly the rollout's response rows lie on the experts: an expert's share of a layer's
    rows times E, less 1.

    Args:
        load: layer -> rows of each expert  # [E]
    """
    violations = {
        layer: rows.double() * len(rows) / rows.sum() - 1
        for layer, rows in load.items()
        if rows.any()
    }
    if not violations:
        return {}
    whole = torch.stack(list(violations.values()))
    return {
        "routing/load_max": float(whole.max()),
        "routing/load_min": float(whole.min()),
        "routing/load_mean": float(whole.abs().mean()),
        **{f"routing/load_max/layer_{n}": float(v.max()) for n, v in violations.items()},
    }


def update_metrics(updates: Sequence[Updated], mini_batches: int) -> dict[str, float]:
    """Means over the loss tokens of all updates of a step.

    What a loss of one's own measures is ``own/NAME``.
    """
    skipped = {"policy/skipped_updates": float(mini_batches - len(updates))}
    if not updates:
        return skipped

    def mean(name: str) -> float:
        return sum(u.totals[name] for u in updates) / max(
            1.0, sum(u.totals["tokens"] for u in updates)
        )

    names = {"policy/ratio_mean": "ratio", "policy/kl": "kl"}
    names |= {"policy/entropy": "entropy", "policy/ref_kl": "ref_kl"}
    totals = updates[0].totals
    stats = [name.removeprefix("stat/") for name in totals if name.startswith("stat/")]
    names |= {f"{'policy' if s in STATS else 'own'}/{s}": f"stat/{s}" for s in stats}
    metrics = {
        "policy/loss": sum(u.totals["loss"] for u in updates) / len(updates),
        "policy/policy_loss": sum(u.totals["policy_loss"] for u in updates) / len(updates),
        **{metric: mean(name) for metric, name in names.items() if name in totals},
        "policy/ratio_max": max(u.maxima["ratio_max"] for u in updates),
        "policy/ratio_min": -max(u.maxima["ratio_min"] for u in updates),
        "policy/entropy_max": max(u.maxima["entropy_max"] for u in updates),
        "policy/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "policy/lr": updates[-1].lr,
    }
    if {"clip_fraction_low", "clip_fraction_high"} <= set(stats):
        sides = metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]
        metrics["policy/clip_fraction"] = sum(sides)
    return metrics | skipped


STATS = ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction")
"""What the losses of `rltrain.algorithms.losses` measure."""
