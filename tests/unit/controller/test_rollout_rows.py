"""Rows of rollouts.jsonl, on a batch made by hand."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.batch import Batch
from rltrain.config.trainer import TrackingConfig
from rltrain.controller.rollout_rows import keeps_rollouts, rollout_rows, whole_groups
from rltrain.controller.sampling import Sampled
from rltrain.data.problem import Problem
from rltrain.data.tokenizer import EOS, tiny_tokenizer
from rltrain.environments.reward_sample import RewardResult

TOKENIZER = tiny_tokenizer()
RESPONSES = ["7" + EOS, "\u20ac8", "no", "3" + EOS]
"""Two groups of two; the second response is cut, and the third has no reward."""
REWARDS = [1.0, 0.0, math.nan, 0.5]


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def sampled() -> Sampled:
    parts = [tokens_of(response) for response in RESPONSES]
    lens = torch.tensor([2 + len(part) for part in parts])
    mask = torch.cat([torch.arange(n) >= 2 for n in lens.tolist()])
    num_tokens = int(lens.sum())
    batch = Batch(
        tokens=torch.tensor([t for part in parts for t in (1, 9, *part)]),
        seq_lens=lens,
        response_mask=mask,
        loss_mask=mask & torch.tensor(REWARDS).isfinite().repeat_interleave(lens),
        rollout_logprobs=-torch.arange(num_tokens) / 8.0,
        rewards=torch.tensor(REWARDS),
        advantages=torch.tensor([0.5, -0.5, 0.0, 0.25]).repeat_interleave(lens),
        group_ids=torch.tensor([4, 4, 6, 6]),
        truncated=torch.tensor([False, True, False, False]),
    )
    results = [
        RewardResult(1.0, "ok", "", 0.0, True, {"format": 0.25}),
        RewardResult(0.0, "ok", "", 0.0, False),
        RewardResult(None, "timeout", "", 0.0),
        RewardResult(0.5, "ok", "", 0.0),
    ]
    problems = [Problem((1, 9), f"p{n // 2}", {"a": n // 2}) for n in range(4)]
    return Sampled(batch, [f"sequence {n}" for n in range(4)], problems, results)


def rows_of(num_rollouts: int, **measured: Any) -> list[dict[str, Any]]:
    measured = {"trainer_logprobs": None, "flipped": None} | measured
    return rollout_rows(sampled(), num_rollouts, TOKENIZER, **measured)


def test_a_row_is_one_response_and_all_that_is_known_of_its_tokens() -> None:
    batch = sampled().batch
    old = batch.require("rollout_logprobs")[0] + 0.125
    flipped = torch.arange(batch.num_tokens) % 3 == 0
    first, second, *_ = rows_of(4, trainer_logprobs=old, flipped=flipped)
    assert first == {
        "group": 4,
        "sample": 0,
        "prompt": "p0",
        "response": "7" + EOS,
        "answer": {"a": 0},
        "reward": 1.0,
        "reward_parts": {"format": 0.25},
        "advantage": 0.5,
        "finish_reason": "stop",
        "tokens": ["7", EOS],
        "rollout_logprobs": [-0.25, -0.375],
        "old_logprobs": [-0.125, -0.25],
        "ratio": pytest.approx([math.exp(0.125)] * 2, rel=1e-5),
        "flipped": [0, 1],
        "loss_mask": [1, 1],
    }
    assert (second["sample"], second["finish_reason"]) == (1, "length")
    assert second["response"] == "\u20ac8"
    assert second["tokens"] == ["\\xe2", "\\x82", "\\xac", "8"]
    json.dumps(first, allow_nan=False)


def test_what_was_not_measured_is_null_and_a_failed_reward_too() -> None:
    rows = rows_of(4)
    assert [row["reward"] for row in rows] == [1.0, 0.0, None, 0.5]
    assert [row["advantage"] for row in rows] == [0.5, -0.5, None, 0.25]
    assert [row["loss_mask"] for row in rows] == [[1, 1], [1] * 4, [0, 0], [1, 1]]
    assert all(row[name] is None for row in rows for name in ("old_logprobs", "ratio", "flipped"))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 12))
def test_groups_are_whole(sizes: list[int], wanted: int) -> None:
    group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
    kept = len(whole_groups(group_of, wanted))
    assert kept in [sum(sizes[:n]) for n in range(1, len(sizes) + 1)]
    assert kept <= max(wanted, sizes[0])
    more = [sum(sizes[:n]) for n in range(1, len(sizes) + 1) if kept < sum(sizes[:n]) <= wanted]
    assert not more


def test_the_steps_that_are_kept() -> None:
    def kept(last: int, **values: Any) -> list[int]:
        tracking = TrackingConfig(**values)
        return [step for step in range(1, last + 1) if keeps_rollouts(tracking, step, last)]

    assert kept(25, rollouts_every=10) == [1, 11, 21, 25]
    assert kept(3, rollouts_every=1) == [1, 2, 3]
    assert kept(25, rollouts_every=0) == kept(25, num_samples=0) == []
