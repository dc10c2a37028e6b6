"""Rollouts and samples on the page: spread over the run, whole groups, within a budget."""

import json

import pytest

from rltrain.tracking.report import rollout_samples
from rltrain.tracking.report.rollout_samples import (
    MAX_TOKENS,
    compact,
    evaluation_samples,
    read_rollouts,
    spread,
)


def _rollout(step, tokens=3, **changes):
    return {
        "step": step,
        "group": 0,
        "sample": 1,
        "prompt": "p",
        "response": "r",
        "answer": 7,
        "reward": 1.0,
        "reward_parts": {"format": 0.123456},
        "advantage": -0.5,
        "finish_reason": "stop",
        "tokens": ["t"] * tokens,
        "rollout_logprobs": [-0.123456] * tokens,
        "old_logprobs": [-0.2] * tokens,
        "ratio": None,
        "flipped": [0] * tokens,
        "loss_mask": [1] * tokens,
        **changes,
    }


def _write(folder, rollouts, tail=""):
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts) + tail)
    return path


def test_the_last_and_the_first_come_first_and_then_the_middle():
    assert list(spread([1, 2, 3, 4, 5])) == [5, 1, 3, 2, 4]
    assert list(spread([4])) == [4]
    assert list(spread([])) == []


def test_rollouts_keep_their_order_and_a_torn_line_is_left_out(tmp_path):
    path = _write(tmp_path, [_rollout(1), _rollout(1, sample=2), _rollout(9)], '{"step": 10, "pr')
    rollouts, note = read_rollouts(path)
    assert [(r["step"], r["sample"]) for r in rollouts] == [(1, 1), (1, 2), (9, 1)]
    assert note == ""
    assert read_rollouts(tmp_path / "none.jsonl") == ([], "")


def test_a_budget_leaves_out_whole_steps_and_says_so(tmp_path, monkeypatch):
    path = _write(tmp_path, [_rollout(step, tokens=100) for step in range(1, 12)])
    monkeypatch.setattr(rollout_samples, "MAX_BYTES", 9000)
    rollouts, note = read_rollouts(path)
    steps = [rollout["step"] for rollout in rollouts]
    assert 1 in steps and 11 in steps and len(steps) < 11
    assert note == f"{len(steps)} of 11 steps with kept rollouts are on this page."


def test_the_only_step_is_shown_whatever_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_samples, "MAX_BYTES", 10)
    assert len(read_rollouts(_write(tmp_path, [_rollout(1)]))[0]) == 1


def test_numbers_are_rounded_and_lists_of_another_length_are_dropped():
    small = compact(_rollout(1, rollout_logprobs=[-0.123456, None, float("nan")], old_logprobs=[1]))
    assert small["rollout_logprobs"] == [-0.1235, None, None]
    assert small["old_logprobs"] is None and small["ratio"] is None
    assert small["reward_parts"] == {"format": 0.1235} and small["answer"] == "7"


@pytest.mark.parametrize("missing", ["tokens", "reward_parts", "reward", "flipped", "prompt"])
def test_a_rollout_of_another_version_is_shown_without_what_it_lacks(missing):
    rollout = _rollout(1)
    del rollout[missing]
    assert compact(rollout)["step"] == 1


def test_a_long_response_is_cut_and_its_length_is_kept():
    small = compact(_rollout(1, tokens=MAX_TOKENS + 5))
    assert len(small["tokens"]) == len(small["loss_mask"]) == MAX_TOKENS
    assert small["num_tokens"] == MAX_TOKENS + 5


def test_evaluations_are_newest_first_within_a_budget(monkeypatch):
    rows = [{"step": step, "response": "x" * 100} for step in range(10) for _ in range(2)]
    shown, note = evaluation_samples(rows)
    assert [step for step, _ in shown] == list(range(9, -1, -1)) and note == ""
    monkeypatch.setattr(rollout_samples, "MAX_EVALUATION_BYTES", 800)
    shown, note = evaluation_samples(rows)
    assert shown[0][0] == 9 and note == f"{len(shown)} of 10 evaluations are on this page."
    assert len(shown) < 10
