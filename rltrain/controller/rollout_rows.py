"""Rows of rollouts.jsonl: a few of a step's training rollouts, token by token. Pure."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rltrain.config.trainer import TrackingConfig
from rltrain.controller.sampling import Sampled
from rltrain.data.prompts import Tokenizer
from rltrain.data.token_texts import decoded, token_texts

DIGITS = 6


def keeps_rollouts(tracking: TrackingConfig, step: int, last: int) -> bool:
    """On the first step, every ``rollouts_every``-th after it, and the last."""
    every = tracking.rollouts_every
    return every > 0 and tracking.num_samples > 0 and ((step - 1) % every == 0 or step == last)


def rollout_rows(
    sampled: Sampled,
    num_rollouts: int,
    tokenizer: Tokenizer,
    *,
    trainer_logprobs: Tensor | None,
    flipped: Tensor | None,
) -> list[dict[str, Any]]:
    """The first groups of the step, whole: as many as ``num_rollouts`` holds, at least one.

    Args:
        sampled: its batch with advantages and the final loss mask
        trainer_logprobs: before the update, routed as the update is; None where the pass was left
            out  # [N]
        flipped: tokens that a routing difference can have changed; None where it was not
            measured  # [N]
    """
    offsets = sampled.batch.offsets.tolist()
    group_of = sampled.batch.require("group_ids")[0].tolist()
    rows, sample = [], -1
    for n in whole_groups(group_of, num_rollouts):
        sample = sample + 1 if n and group_of[n] == group_of[n - 1] else 0
        span = slice(offsets[n], offsets[n + 1])
        old = None if trainer_logprobs is None else trainer_logprobs[span]
        flips = None if flipped is None else flipped[span]
        row = _row(sampled.select([n]), tokenizer, old, flips)
        rows.append({"group": group_of[n], "sample": sample, **row})
    return rows


def _row(
    sampled: Sampled, tokenizer: Tokenizer, trainer_logprobs: Tensor | None, flipped: Tensor | None
) -> dict[str, Any]:
    """Of one sequence."""
    batch, (problem,), (result,) = sampled.batch, sampled.problems, sampled.results
    here = batch.response_mask
    rewards, advantages, truncated = batch.require("rewards", "advantages", "truncated")
    engine, loss_mask = batch.require("rollout_logprobs", "loss_mask")
    tokens = batch.tokens[here].tolist()
    is_scored = bool(rewards.isfinite())
    old = None if trainer_logprobs is None else trainer_logprobs[here].double()
    rollout = engine[here].double()
    return {
        "prompt": problem.prompt,
        "response": decoded(tokenizer, tokens),
        "answer": problem.answer,
        "reward": float(rewards) if is_scored else None,
        "reward_parts": dict(result.parts),
        "advantage": float(advantages[here].double().mean()) if is_scored else None,
        "finish_reason": "length" if truncated else "stop",
        "tokens": token_texts(tokenizer, tokens),
        "rollout_logprobs": _rounded(rollout),
        "old_logprobs": None if old is None else _rounded(old),
        "ratio": None if old is None else _rounded((old - rollout).exp()),
        "flipped": None if flipped is None else flipped[here].int().tolist(),
        "loss_mask": loss_mask[here].int().tolist(),
    }


def whole_groups(group_of: Sequence[int], num_rollouts: int) -> range:
    """The sequences of the first groups that ``num_rollouts`` holds, at least of one."""
    ends = [n + 1 for n in range(len(group_of)) if group_of[n : n + 1] != group_of[n + 1 : n + 2]]
    fitting = [end for end in ends if end <= num_rollouts]
    return range(fitting[-1] if fitting else ends[0])


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
