"""What a reward function judges, and the greedy responses to held-out problems."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rltrain.config import Config
from rltrain.config.trainer import TrainerConfig
from rltrain.controller.step_metrics import part_means
from rltrain.data.problem import Problem
from rltrain.data.prompts import Tokenizer
from rltrain.environments.pool import RewardPool
from rltrain.environments.reward_sample import RewardInput, RewardResult
from rltrain.rollout.generator import Generator
from rltrain.rollout.requests import Rollout
from rltrain.rollout.stop_strings import response_texts
from rltrain.tracking.tracker import Tracker


def sample_of(problem: Problem, raw: str, clean: str | None = None) -> RewardInput:
    """A response to a problem as the reward function gets it; ``clean`` is ``raw`` by default."""
    return RewardInput(
        raw=raw,
        clean=raw if clean is None else clean,
        answer=problem.answer,
        prompt=problem.prompt,
        columns=problem.columns,
        prompt_id=problem.id,
    )


def rewarded_samples(
    tokenizer: Tokenizer, problem: Problem, rollouts: Sequence[Rollout]
) -> list[RewardInput]:
    """What the reward function sees of the responses to a problem."""
    return [sample_of(problem, *response_texts(tokenizer, rollout)) for rollout in rollouts]


def is_due(trainer: TrainerConfig, step: int) -> bool:
    every = trainer.eval_every
    return every > 0 and (step % every == 0 or step == trainer.steps)


INTEGER = re.compile(r"-?\d+")


@dataclass
class Evaluator:
    """Answers every held-out problem once, greedily, with the weights the engines have."""

    config: Config
    held_out: Sequence[Problem]
    generator: Generator
    pool: RewardPool
    tokenizer: Tokenizer
    tracker: Tracker

    def is_due(self, step: int) -> bool:
        """On step 0, every ``eval_every``-th and the last; never without a held-out problem."""
        return bool(self.held_out) and is_due(self.config.trainer, step)

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics ``eval/...``.

        Raises:
            RuntimeError: as `RewardPool.collect`: too many rewards failed.
        """
        rollouts = self.generator.greedy(self.held_out)
        samples = [
            sample
            for problem, rollout in zip(self.held_out, rollouts, strict=True)
            for sample in rewarded_samples(self.tokenizer, problem, [rollout])
        ]
        results = self.pool.score(samples)
        self.tracker.samples(
            step, [self._row(*row) for row in zip(self.held_out, rollouts, results, strict=True)]
        )
        metrics = {
            **evaluation_metrics(results),
            "eval/truncated_fraction": statistics.fmean(
                r.finish_reason == "length" for r in rollouts
            ),
            "eval/response_length_mean": statistics.fmean(len(r.response_tokens) for r in rollouts),
        }
        reward = self.config.data.reward
        texts = [sample.raw if reward.text == "raw" else sample.clean for sample in samples]
        integers = [
            text
            for text, problem in zip(texts, self.held_out, strict=True)
            if INTEGER.fullmatch(str(problem.answer))
        ]
        if "exact" in reward.functions.values() and integers:
            wrong = [INTEGER.fullmatch(text.strip()) is None for text in integers]
            metrics["eval/format_error_fraction"] = statistics.fmean(wrong)
        return metrics

    def _row(self, problem: Problem, rollout: Rollout, result: RewardResult) -> dict[str, object]:
        text = self.tokenizer.decode(
            rollout.response_tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return {
            "prompt": problem.prompt,
            "response": text,
            "answer": problem.answer,
            "reward": result.value,
            "finish_reason": rollout.finish_reason,
        }


def evaluation_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """Of rewards that were computed; a failed one is counted and is no 0. Accuracy is left out
    unless each of them comes with whether its response is correct."""
    scored = [result for result in results if result.value is not None]
    metrics = {
        "eval/num_scored": float(len(scored)),
        "eval/failed_fraction": 1 - len(scored) / len(results),
    }
    if not scored:
        return metrics
    metrics["eval/reward_mean"] = statistics.fmean(r.value for r in scored if r.value is not None)
    metrics |= part_means(scored, "eval")
    verdicts = [result.correct for result in scored if result.correct is not None]
    if len(verdicts) == len(scored):
        metrics["eval/accuracy"] = statistics.fmean(verdicts)
    return metrics
