"""A step's numbers, of its batch, of what its workers measured and of its updates. Pure.

Formulas and denominators are in `rltrain.tracking.catalogue`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rltrain.algorithms.sequences import sequence_sum
from rltrain.batch import Batch
from rltrain.environments.reward_sample import RewardResult
from rltrain.policy.types import NO_FLIP, Agreement, Scored, Updated
from rltrain.routing.links import Link

STATS = ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction")
"""What the losses of `rltrain.algorithms.losses` measure."""


def reward_metrics(batch: Batch, results: Sequence[RewardResult]) -> dict[str, float]:
    """Of the sequences that have a reward; where none has, the shares of those alone.

    Args:
        results: what the reward function said of each sequence
    """
    num_timeouts = sum(result.status == "timeout" for result in results)
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
        **_correct_metrics(groups.tolist(), [r.correct for r in results], len(scored)),
        **part_means(results, "reward"),
    }


def part_means(results: Sequence[RewardResult], area: str) -> dict[str, float]:
    """The mean of every part of the reward, over the responses whose reward has that part."""
    by_name: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.parts.items():
            by_name.setdefault(name, []).append(value)
    return {f"{area}/part/{name}": statistics.fmean(v) for name, v in sorted(by_name.items())}


def _correct_metrics(
    groups: Sequence[int], correct: Sequence[bool | None], num_scored: int
) -> dict[str, float]:
    """Nothing, unless every response that has a reward was judged correct or wrong."""
    verdicts = [verdict for verdict in correct if verdict is not None]
    if len(verdicts) < num_scored:
        return {}
    by_group: dict[int, list[bool]] = {}
    for group, verdict in zip(groups, correct, strict=True):
        if verdict is not None:
            by_group.setdefault(group, []).append(verdict)
    return {
        "reward/accuracy": sum(verdicts) / len(verdicts),
        "group/all_correct_fraction": sum(map(all, by_group.values())) / len(by_group),
        "group/all_wrong_fraction": 1 - sum(map(any, by_group.values())) / len(by_group),
    }


def _share(groups: Sequence[Tensor], holds: Callable[[Tensor], bool]) -> float:
    return sum(map(holds, groups)) / len(groups)


def replayed_metrics(scored: Scored) -> dict[str, float]:
    """Which share of the rollout's experts its routers replaced; with ``min_gate_ratio``."""
    kept, whole = scored.replayed
    return {"routing/replaced_fraction": 1 - kept / whole} if whole else {}


def rollout_metrics(batch: Batch) -> dict[str, float]:
    lengths = sequence_sum(batch.response_mask.float(), batch.seq_lens)
    metrics = {
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/num_tokens": float(batch.num_tokens),
        "rollout/num_response_tokens": float(lengths.sum()),
    }
    if batch.truncated is not None:
        metrics["rollout/truncated_fraction"] = float(batch.truncated.float().mean())
    if batch.token_versions is not None:
        metrics["rollout/weight_version"] = float(batch.token_versions.min())
    if isinstance(batch.rollout_expert_indices, tuple):
        owed = batch.num_tokens - batch.num_sequences  # the last token of a sequence owes no route
        refs = [ref for of_sample in batch.rollout_expert_indices for ref in of_sample]
        row_bytes = (
            len(refs[0].layers) * refs[0].experts_per_token * (1 if refs[0].dtype == "uint8" else 2)
        )
        (route_mask,) = batch.require("route_mask")
        metrics["routing/coverage"] = float(route_mask.sum()) / owed
        metrics["routing/bytes_per_token"] = float(row_bytes)
        metrics["routing/host_bytes"] = float(row_bytes * sum(ref.rows for ref in refs))
    return metrics


def link_metrics(batch: Batch, links: Mapping[Link, int]) -> dict[str, float]:
    """What the routes of a step cost the links between nodes: 0 where all is on one node, nothing
    where there are no routes to bring.

    Args:
        links: bytes that came over each
    """
    if not isinstance(batch.rollout_expert_indices, tuple):
        return {}
    return {"routing/bytes_between_nodes": float(sum(links.values()))}


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

    What a loss of one's own measures is ``custom/NAME``.
    """
    metrics = learner_metrics(updates, mini_batches)
    if not updates:
        return metrics
    names = {"policy/ratio_mean": "ratio", "policy/kl": "kl"}
    names |= {"policy/entropy": "entropy", "policy/ref_kl": "ref_kl"}
    totals = updates[0].totals
    stats = [name.removeprefix("stat/") for name in totals if name.startswith("stat/")]
    names |= {f"{'policy' if s in STATS else 'custom'}/{s}": f"stat/{s}" for s in stats}
    metrics |= {
        "policy/policy_loss": sum(u.totals["policy_loss"] for u in updates) / len(updates),
        **{metric: _token_mean(updates, n) for metric, n in names.items() if n in totals},
        "policy/ratio_max": max(u.maxima["ratio_max"] for u in updates),
        "policy/ratio_min": -max(u.maxima["ratio_min"] for u in updates),
        "policy/entropy_max": max(u.maxima["entropy_max"] for u in updates),
    }
    if {"clip_fraction_low", "clip_fraction_high"} <= set(stats):
        sides = metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]
        metrics["policy/clip_fraction"] = sum(sides)
    return metrics


def supervised_metrics(updates: Sequence[Updated], mini_batches: int) -> dict[str, float]:
    """The loss of a token, whatever ``algorithm.aggregation`` makes of it, over all updates."""
    metrics = learner_metrics(updates, mini_batches)
    return metrics | ({"sft/loss": _token_mean(updates, "nll")} if updates else {})


def learner_metrics(updates: Sequence[Updated], mini_batches: int) -> dict[str, float]:
    """What every kind of update has."""
    metrics = {"policy/skipped_updates": float(mini_batches - len(updates))}
    if updates:
        metrics |= {
            "policy/loss": sum(u.totals["loss"] for u in updates) / len(updates),
            "policy/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
            "policy/lr": updates[-1].lr,
        }
    return metrics


def _token_mean(updates: Sequence[Updated], name: str) -> float:
    """Over the loss tokens of all updates."""
    tokens = sum(u.totals["tokens"] for u in updates)
    return sum(u.totals[name] for u in updates) / max(1.0, tokens)


def mismatch_over_entropy(metrics: Mapping[str, float]) -> dict[str, float]:
    """The mismatch in units of what there is to disagree about; nothing without both."""
    k3, entropy = metrics.get("mismatch/k3"), metrics.get("policy/entropy", 0.0)
    return {} if k3 is None or entropy <= 0 else {"policy/mismatch_over_entropy": k3 / entropy}


def value_metrics(batch: Batch, updates: Sequence[Updated]) -> dict[str, float]:
    """The ``value/`` metrics of a step: of its loss tokens, with the values that its advantages
    were made of, and of its critic's updates.

    Args:
        batch: with ``values``, ``returns`` and ``loss_weights``
    """
    metrics: dict[str, float] = {}
    values, returns, weights = batch.require("values", "returns", "loss_weights")
    counted = weights != 0
    if counted.any():
        values, returns = values[counted].double(), returns[counted].double()
        metrics = {"value/mean": float(values.mean()), "value/return_mean": float(returns.mean())}
        explained = explained_variance(values, returns)
        metrics |= {} if explained is None else {"value/explained_variance": explained}
    if updates:
        clipped, tokens = (sum(u.totals[name] for u in updates) for name in ("clipped", "tokens"))
        metrics |= {
            "value/loss": sum(u.totals["loss"] for u in updates) / len(updates),
            "value/clip_fraction": clipped / max(1.0, tokens),
            "value/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
            "value/lr": updates[-1].lr,
        }
    return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """``1 - Var[R - V] / Var[R]`` (openai/baselines ``common/math_util.py``): 1 for perfect values,
    0 for constant ones. None where every return is the same: nothing is there to explain.

    Args:
        values, returns: of the tokens that count  # [n] each
    """
    if not len(returns) or bool((returns == returns[0]).all()):
        return None
    errors = (returns.double() - values.double()).var(unbiased=False)
    return 1 - float(errors / returns.double().var(unbiased=False))
