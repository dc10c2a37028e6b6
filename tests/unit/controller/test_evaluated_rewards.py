"""Evaluation with real reward processes, of canned responses: what is logged, and what is not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rltrain.config import Config
from rltrain.controller.evaluation import Evaluator, rewarded_samples, sample_of
from rltrain.data.problem import Problem
from rltrain.data.tokenizer import EOS, tiny_tokenizer
from rltrain.environments.pool import RewardPool
from rltrain.rollout.requests import Rollout

TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def import_from_the_rewards_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "environments"))


def rollout(text: str, *, stop_string: str | None = None) -> Rollout:
    """A response to which ``<eos>`` in the text is the end-of-sequence token."""
    tokens = tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    ended = text.endswith(EOS) or stop_string is not None
    return Rollout((1,), tokens, None, "stop" if ended else "length", 0, None, stop_string)


@dataclass
class Greedy:
    """Answers by prompt; the order of the problems is the caller's."""

    answers: dict[str, Rollout]

    def greedy(self, problems: Sequence[Problem]) -> list[Rollout]:
        return [self.answers[problem.prompt] for problem in problems]


@dataclass
class Tracker:
    rows: list[Any] = field(default_factory=list)

    def samples(self, step: int, rows: Sequence[Any]) -> None:
        self.rows += [(step, row) for row in rows]


def evaluate(
    answers: Sequence[tuple[Any, Rollout]], step: int = 0, **reward: Any
) -> tuple[dict[str, float], list[Any]]:
    patient = {"timeout_s": 120.0}  # machines are busy
    reward = {"max_failed_fraction": 1.0, "num_workers": 1} | patient | reward
    config = Config.model_validate({"data": {"reward": reward}})
    problems = [Problem((1,), f"p{i}", answer) for i, (answer, _) in enumerate(answers)]
    greedy: Any = Greedy({f"p{i}": found for i, (_, found) in enumerate(answers)})
    tracker: Any = Tracker()
    with TemporaryDirectory() as logs, RewardPool(config.data.reward, Path(logs)) as pool:
        evaluator = Evaluator(config, problems, greedy, pool, TOKENIZER, tracker)
        return evaluator.evaluate(step), tracker.rows


def test_what_exact_finds() -> None:
    metrics, rows = evaluate(
        [
            ("42", rollout("42<eos>")),
            ("42", rollout("24<eos>")),
            (7, rollout(" 7\n<eos>")),
            ("7", rollout("seven<eos>")),
            ("yes", rollout("42")),
        ],
        step=3,
    )
    assert metrics == {
        "eval/reward_mean": 2 / 5,
        "eval/accuracy": 2 / 5,
        "eval/num_scored": 5,
        "eval/failed_fraction": 0,
        "eval/format_error_fraction": 1 / 4,  # of the four with an integer as answer
        "eval/truncated_fraction": 1 / 5,
        "eval/response_length_mean": (3 + 3 + 4 + 6 + 2) / 5,
    }
    assert rows[1] == (
        3,
        {
            "prompt": "p1",
            "response": "24<eos>",
            "answer": "42",
            "reward": 0.0,
            "finish_reason": "stop",
        },
    )
    assert [row["prompt"] for _, row in rows] == [f"p{i}" for i in range(5)]


def test_a_failed_reward_is_counted_and_is_no_zero() -> None:
    responses = ["is 1<eos>", "raise lost<eos>", "is 0.5<eos>", "nan<eos>"]
    answers = [(None, rollout(text)) for text in responses]
    metrics, rows = evaluate(answers, function="sample_rewards.act_out", success_at=1.0)
    assert metrics["eval/reward_mean"] == 0.75
    assert metrics["eval/accuracy"] == 0.5
    assert metrics["eval/failed_fraction"] == 0.5
    assert [row["reward"] for _, row in rows] == [1.0, None, 0.5, None]
    with pytest.raises(RuntimeError, match="2 of 4 samples have no reward"):
        evaluate(answers, function="sample_rewards.act_out", max_failed_fraction=0.4)


def test_where_every_reward_failed_there_is_no_mean() -> None:
    metrics, _ = evaluate([(None, rollout("nan<eos>"))] * 2, function="sample_rewards.act_out")
    assert metrics == {
        "eval/num_scored": 0,
        "eval/failed_fraction": 1.0,
        "eval/truncated_fraction": 0,
        "eval/response_length_mean": 4.0,
    }


def test_accuracy_needs_someone_who_says_what_is_correct() -> None:
    answers = [(None, rollout(f"{value}<eos>")) for value in (0.25, 0.75, 2.0, 3.0)]
    silent, _ = evaluate(answers, function="sample_rewards.graded")
    assert "eval/accuracy" not in silent and silent["eval/reward_mean"] == 1.5
    declared, _ = evaluate(answers, function="sample_rewards.declared")  # from 0.5 on
    assert declared["eval/accuracy"] == 0.75
    asked, _ = evaluate(answers, function="sample_rewards.declared", success_at=2.5)
    assert asked["eval/accuracy"] == 0.25
    saying = [(None, rollout('{"reward": 0, "correct": True}<eos>')), (None, rollout("9<eos>"))]
    assert evaluate(saying[:1], function="sample_rewards.graded")[0]["eval/accuracy"] == 1.0
    assert "eval/accuracy" not in evaluate(saying, function="sample_rewards.graded")[0]


def test_no_format_is_expected_but_of_integers_compared_as_text() -> None:
    for reward, answer in (("exact", "x"), ("math_verify", "42")):
        metrics, _ = evaluate([(answer, rollout("?<eos>"))], function=reward, timeout_s=60.0)
        assert "eval/format_error_fraction" not in metrics


def test_components_are_evaluated_as_they_are_trained_on() -> None:
    parts = {
        "right": {"function": "exact", "weight": 2},
        "long": {"function": "sample_rewards.length"},
    }
    answers = [("42", rollout("42<eos>")), ("42", rollout("seven<eos>"))]
    metrics, rows = evaluate(answers, components=parts)
    assert [row["reward"] for _, row in rows] == [4.0, 5.0]
    assert (metrics["eval/part/right"], metrics["eval/part/long"]) == (0.5, 3.5)
    assert (metrics["eval/accuracy"], metrics["eval/format_error_fraction"]) == (0.5, 0.5)
    del parts["right"]
    assert "eval/format_error_fraction" not in evaluate(answers, components=parts)[0]


def test_training_and_evaluation_judge_the_text_that_was_asked_for() -> None:
    special = rollout("<|start|>final<|start|>42<eos>")
    for text, response in (("raw", "<|start|>final<|start|>42"), ("clean", "final42")):
        metrics, _ = evaluate([(response, special)], text=text)
        assert metrics["eval/accuracy"] == 1.0
    problem = Problem((1,), "p", "7", {"level": 1})
    (sample,) = rewarded_samples(TOKENIZER, problem, [special])
    assert (sample.raw, sample.clean) == ("<|start|>final<|start|>42", "final42")
    assert (sample.answer, sample.prompt, sample.columns) == ("7", "p", {"level": 1})
    assert sample_of(problem, "x") == sample_of(problem, "x", "x")


def test_a_stop_string_is_not_judged() -> None:
    metrics, _ = evaluate([("42", rollout("42\n\n", stop_string="\n\n"))])
    assert metrics["eval/accuracy"] == 1.0 and metrics["eval/truncated_fraction"] == 0
