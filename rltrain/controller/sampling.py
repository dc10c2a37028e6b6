"""A step's responses and their rewards; with dynamic sampling, until enough groups teach."""

import logging
from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller import stages, step_metrics
from rltrain.controller.evaluation import rewarded_samples
from rltrain.data.loader import PromptLoader
from rltrain.data.problem import Problem
from rltrain.data.prompts import Tokenizer
from rltrain.environments.pool import RewardPool
from rltrain.environments.reward_sample import RewardResult
from rltrain.rollout.generator import Generator, ResponseGroup, build_batch
from rltrain.rollout.requests import request_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    batch: Batch  # with rewards and loss_mask
    names: list[str]  # how an error names each sequence
    problems: list[Problem]  # of each sequence
    results: list[RewardResult]  # of each sequence; data.reward.shuffle leaves them where they are
    num_aborted: int = 0  # groups

    def select(self, rows: Sequence[int]) -> "Sampled":
        return replace(
            self,
            batch=self.batch.select(rows),
            names=[self.names[r] for r in rows],
            problems=[self.problems[r] for r in rows],
            results=[self.results[r] for r in rows],
        )


Wait = Literal["generate", "reward"]
Sampling = abc.Generator[Wait, None, tuple[Sampled, dict[str, float]]]
"""The sampling of one step, bit by bit: it yields what it waits for. What it returns are groups of
judged responses, and what was seen of all of them."""


@dataclass
class Sampler:
    config: Config
    prompts: PromptLoader
    generator: Generator
    pool: RewardPool
    tokenizer: Tokenizer

    def sample(self, step: int, patience: Callable[[], float]) -> Sampling:
        """Groups of judged responses to the next prompts, and what was seen of all of them.

        With ``algorithm.dynamic_sampling`` groups of equal rewards go and further prompts come, for
        as many rounds as it allows. What teaches is then trained on, however little; where nothing
        does, no token is left in the loss.

        Args:
            patience: how many seconds it may wait for engines before it yields
        """
        dynamic = self.config.algorithm.dynamic_sampling.max_rounds
        wanted = self.config.trainer.prompts_per_step
        if not dynamic:
            sampled = yield from self._round(step, 0, patience)
            return sampled, self._metrics(sampled)
        rounds: list[Sampled] = []
        kept: list[Sampled] = []
        num_kept = 0
        for round in range(dynamic):
            rounds.append((yield from self._round(step, round, patience)))
            rows = teaching_rows(rounds[-1].batch, wanted - num_kept)
            kept.append(rounds[-1].select(rows))
            num_kept += len(rows) // self.config.algorithm.group_size
            if num_kept == wanted:
                break
        metrics = self._metrics(join(rounds))
        metrics["group/rounds"] = float(len(rounds))
        metrics["group/kept_fraction"] = num_kept / (len(rounds) * wanted)
        if num_kept < wanted:
            logger.warning(
                "step %d: %d of %d groups teach after %d rounds of generation "
                "(algorithm.dynamic_sampling.max_rounds): training on those",
                step,
                num_kept,
                wanted,
                len(rounds),
            )
        if num_kept == 0:
            none = torch.zeros_like(rounds[-1].batch.response_mask)
            batch = rounds[-1].batch.with_fields(loss_mask=none)
            return replace(rounds[-1], batch=batch), metrics
        return join([part for part in kept if part.names]), metrics

    def _metrics(self, seen: Sampled) -> dict[str, float]:
        metrics = step_metrics.reward_metrics(seen.batch, seen.results)
        metrics |= step_metrics.rollout_metrics(seen.batch)
        if self.config.rollout.oversample:
            metrics["rollout/aborted_groups"] = float(seen.num_aborted)
        return metrics

    def _round(
        self, step: int, round: int, patience: Callable[[], float]
    ) -> abc.Generator[Wait, None, Sampled]:
        """Rewards are computed while other responses are generated: what it waits for is
        ``generate`` up to the last response, and then ``reward`` for what is left."""
        problems = next(self.prompts)
        groups: list[ResponseGroup] = []
        judged: list[Sequence[int]] = []  # by group, what the pool calls its samples
        wanted = self.config.trainer.prompts_per_step
        for group in self.generator.stream(problems, step, round, wanted, patience):
            if group is not None:
                groups.append(group)
                problem = problems[group.index]
                samples = rewarded_samples(self.tokenizer, problem, group.rollouts)
                judged.append(self.pool.submit_group(samples))
            self.pool.poll()
            if group is None:
                yield "generate"
        order = sorted(range(len(groups)), key=lambda n: groups[n].index)
        rollouts = [r for n in order for r in groups[n].rollouts]
        batch = build_batch(rollouts, self.config.algorithm.group_size)
        yield "reward"
        positions = [position for n in order for position in judged[n]]
        while not self.pool.has(positions):
            self.pool.wait(patience())
            self.pool.poll()
            yield "reward"
        results = self.pool.collect(positions)
        batch = stages.with_rewards(
            batch,
            [result.value for result in results],
            shuffle_seed=self._shuffle_seed(step, round),
        )
        names = [name for n in order for name in groups[n].names]
        prompts = [problems[groups[n].index] for n in order for _ in groups[n].names]
        return Sampled(batch, names, prompts, results, len(problems) - len(groups))

    def _shuffle_seed(self, step: int, round: int) -> int | None:
        """Of the control that must not learn; None where rewards stay where they belong."""
        if not self.config.data.reward.shuffle:
            return None
        return request_seed(self.config.trainer.seed, step, "rewards", round)


def join(parts: Sequence[Sampled]) -> Sampled:
    return Sampled(
        Batch.join([part.batch for part in parts]),
        [name for part in parts for name in part.names],
        [problem for part in parts for problem in part.problems],
        [result for part in parts for result in part.results],
        sum(part.num_aborted for part in parts),
    )


def teaching_rows(batch: Batch, most: int) -> list[int]:
    """The sequences of the first ``most`` groups whose scored rewards differ."""
    rewards, group_ids = batch.require("rewards", "group_ids")
    teaching = [g for g in group_ids.unique() if _differ(rewards[group_ids == g])][:most]
    return [row for g in teaching for row in (group_ids == g).nonzero().flatten().tolist()]


def _differ(rewards: Tensor) -> bool:
    scored = rewards[rewards.isfinite()]
    return len(scored) > 0 and bool(scored.min() < scored.max())
