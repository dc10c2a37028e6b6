"""What a reward function judges, and greedy accuracy on held-out problems."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rltrain.config import Config
from rltrain.config.trainer import TrainerConfig
from rltrain.data.problem import Problem
from rltrain.data.prompts import Tokenizer
from rltrain.environments.pool import RewardPool, RewardResult, Sample
from rltrain.rollout.generator import Generator
from rltrain.rollout.types import Rollout
from rltrain.tracking.tracker import Tracker


def judged(tokenizer: Tokenizer, problem: Problem, rollouts: Sequence[Rollout]) -> list[Sample]:
    """What the reward function sees of the responses to a problem."""
    return [
        Sample(
            response=tokenizer.decode(rollout.response_tokens, skip_special_tokens=True),
            answer=problem.answer,
            prompt=problem.prompt,
            columns=problem.columns,
            prompt_id=problem.id,
        )
        for rollout in rollouts
    ]


def is_due(trainer: TrainerConfig, step: int) -> bool:
    every = trainer.eval_every
    return every > 0 and (step % every == 0 or step == trainer.steps)


INTEGER = re.compile(r"-?\d+")


@dataclass
class Evaluator:
    """Answers every held-out problem once, greedily."""

    config: Config
    held_out: Sequence[Problem]
    generator: Generator
    pool: RewardPool
    tokenizer: Tokenizer
    tracker: Tracker

    def is_due(self, step: int) -> bool:
        return is_due(self.config.trainer, step)

    def evaluate(self, step: int) -> dict[str, float]:
        """Accuracy is the share of full rewards.

        A format error is a response of which no answer can be read.
        """
        rollouts = self.generator.greedy(self.held_out)
        results = self.pool.score(
            [
                sample
                for problem, rollout in zip(self.held_out, rollouts, strict=True)
                for sample in judged(self.tokenizer, problem, [rollout])
            ]
        )
        self.tracker.samples(
            step, [self._row(*row) for row in zip(self.held_out, rollouts, results, strict=True)]
        )
        values = [result.value or 0.0 for result in results]
        lengths = [len(rollout.response_tokens) for rollout in rollouts]
        unreadable = [
            not self._is_readable(*pair) for pair in zip(self.held_out, rollouts, strict=True)
        ]
        return {
            "eval/accuracy": sum(value >= 1.0 for value in values) / len(values),
            "eval/format_error_fraction": sum(unreadable) / len(unreadable),
            "eval/response_length_mean": sum(lengths) / len(lengths),
        }

    def _is_readable(self, problem: Problem, rollout: Rollout) -> bool:
        """It ended by itself and, where answers are compared as text, is of the answer's kind."""
        text = self.tokenizer.decode(rollout.response_tokens, skip_special_tokens=True).strip()
        if rollout.finish_reason == "length" or not text:
            return False
        literal = self.config.data.reward.function == "exact" and INTEGER.fullmatch(
            str(problem.answer)
        )
        return INTEGER.fullmatch(text) is not None if literal else True

    def _row(self, problem: Problem, rollout: Rollout, result: RewardResult) -> dict[str, object]:
        return {
            "prompt": problem.prompt,
            "response": self.tokenizer.decode(rollout.response_tokens, skip_special_tokens=False),
            "answer": problem.answer,
            "reward": result.value,
            "finish_reason": rollout.finish_reason,
        }
