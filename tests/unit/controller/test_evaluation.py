"""What an evaluation counts, and when there is one.

Generator, rewards and tracker are stand-ins of a few lines: what they do is tested elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rltrain.config import Config
from rltrain.controller.evaluation import Evaluator, evaluation_metrics, rewarded_samples
from rltrain.data.problem import Problem
from rltrain.data.tokenizer import EOS, tiny_tokenizer
from rltrain.environments.reward_sample import RewardInput, RewardResult
from rltrain.rollout.requests import Rollout

TOKENIZER = tiny_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids(EOS)
ANSWERS = ["7", "21", "13", "yes"]
PROBLEMS = [Problem((1,), f"problem {i}", answer, {"row": i}) for i, answer in enumerate(ANSWERS)]


def rollout(text: str, *, stopped: bool = True) -> Rollout:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [STOP] * stopped
    return Rollout((1,), tuple(tokens), None, "stop" if stopped else "length", 0, None)


ROLLOUTS = [rollout("7"), rollout(" 22 "), rollout("13 or", stopped=False), rollout("no")]


def scored(value: float | None, correct: bool | None = None) -> RewardResult:
    return RewardResult(value, "error" if value is None else "ok", "", 0.1, correct)


RESULTS = [scored(1.0, True), scored(0.25, False), scored(None), scored(0.0, False)]


@dataclass
class Parts:
    """Generator, pool and tracker in one."""

    rollouts: Sequence[Rollout]
    results: Sequence[RewardResult]
    scored: list[RewardInput] = field(default_factory=list)
    rows: list[dict[str, object]] = field(default_factory=list)
    step: int = -1

    def greedy(self, problems: Sequence[Problem]) -> Sequence[Rollout]:
        assert list(problems) == PROBLEMS
        return self.rollouts

    def score(self, samples: Sequence[RewardInput]) -> Sequence[RewardResult]:
        self.scored = list(samples)
        return self.results

    def samples(self, step: int, rows: list[dict[str, object]]) -> None:
        self.step, self.rows = step, rows


def evaluator(
    parts: Any = None, problems: Sequence[Problem] = PROBLEMS, **trainer: Any
) -> Evaluator:
    config = Config.model_validate({"trainer": trainer})
    return Evaluator(config, problems, parts, parts, TOKENIZER, parts)


def test_what_is_logged_of_an_evaluation() -> None:
    """A reward that failed is counted as such, and is not a 0."""
    parts = Parts(ROLLOUTS, RESULTS)
    assert evaluator(parts).evaluate(30) == {
        "eval/num_scored": 3,
        "eval/failed_fraction": 1 / 4,
        "eval/reward_mean": pytest.approx(1.25 / 3),
        "eval/accuracy": pytest.approx(1 / 3),
        "eval/truncated_fraction": 1 / 4,
        "eval/response_length_mean": (2 + 5 + 5 + 3) / 4,
        "eval/format_error_fraction": pytest.approx(1 / 3),  # of three whose answer is an integer
    }
    assert parts.step == 30
    assert [row["answer"] for row in parts.rows] == ANSWERS
    assert [row["reward"] for row in parts.rows] == [1.0, 0.25, None, 0.0]
    assert [row["response"] for row in parts.rows] == [f"7{EOS}", f" 22 {EOS}", "13 or", f"no{EOS}"]
    assert [row["finish_reason"] for row in parts.rows] == ["stop", "stop", "length", "stop"]


def test_each_response_is_judged_by_its_own_problem() -> None:
    parts = Parts(ROLLOUTS, RESULTS)
    evaluator(parts).evaluate(0)
    assert [(s.raw, s.answer, s.prompt, s.columns) for s in parts.scored] == [
        (text, problem.answer, problem.prompt, problem.columns)
        for text, problem in zip(["7", " 22 ", "13 or", "no"], PROBLEMS, strict=True)
    ]
    assert [s.prompt_id for s in parts.scored] == [problem.id for problem in PROBLEMS]


def test_a_group_is_judged_by_one_problem_in_its_order() -> None:
    found = rewarded_samples(TOKENIZER, PROBLEMS[1], ROLLOUTS[:2])
    assert [(s.raw, s.answer) for s in found] == [("7", "21"), (" 22 ", "21")]


def test_accuracy_is_told_only_where_every_reward_says_what_is_correct() -> None:
    assert "eval/accuracy" not in evaluation_metrics([scored(1.0, True), scored(1.0)])
    assert evaluation_metrics([scored(1.0), scored(None)]) == {
        "eval/num_scored": 1,
        "eval/failed_fraction": 0.5,
        "eval/reward_mean": 1.0,
    }
    assert evaluation_metrics([scored(2.0, False), scored(0.5, True)]) == {
        "eval/num_scored": 2,
        "eval/failed_fraction": 0.0,
        "eval/reward_mean": 1.25,
        "eval/accuracy": 0.5,
    }
    parts = [replace(scored(1.0), parts={"format": n}) for n in (0.0, 1.0)]
    assert evaluation_metrics([*parts, scored(None)])["eval/part/format"] == 0.5
    assert evaluation_metrics([scored(None)]) == {
        "eval/num_scored": 0,
        "eval/failed_fraction": 1.0,
    }


def test_it_is_due_at_the_start_every_so_often_and_at_the_end() -> None:
    due = evaluator(steps=25, eval_every=10).is_due
    assert [step for step in range(26) if due(step)] == [0, 10, 20, 25]
    assert not any(map(evaluator(steps=25, eval_every=0).is_due, range(26)))
    assert not any(map(evaluator(problems=[], steps=25, eval_every=10).is_due, range(26)))
