"""A step's responses and their rewards; with dynamic sampling, until enough groups teach."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller import stages, step_metrics
from rltrain.controller.evaluation import judge
from rltrain.data.loader import PromptLoader
from rltrain.data.prompts import Tokenizer
from rltrain.environments.pool import RewardPool
from rltrain.rollout.generator import Generator
from rltrain.tracking.timers import StepTimer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    batch: Batch  # with rewards and loss_mask
    names: list[str]  # how an error names each sequence
    num_timeouts: int = 0

    def select(self, rows: Sequence[int]) -> "Sampled":
        return Sampled(self.batch.select(rows), [self.names[r] for r in rows], self.num_timeouts)


@dataclass
class Sampler:
    config: Config
    prompts: PromptLoader
    generator: Generator
    pool: RewardPool
    tokenizer: Tokenizer

    def sample(self, step: int, timer: StepTimer) -> tuple[Sampled, dict[str, float]]:
        """Groups of judged responses to the next prompts, and what was seen of all of them.

        With ``algorithm.dynamic_sampling`` groups of equal rewards go and further prompts come, for
        as many rounds as it allows. What teaches is then trained on, however little; where nothing
        does, no token is left in the loss.
        """
        dynamic = self.config.algorithm.dynamic_sampling.max_rounds
        wanted = self.config.trainer.prompts_per_step
        if not dynamic:
            sampled = self._round(step, 0, timer)
            return sampled, _metrics(sampled)
        rounds: list[Sampled] = []
        kept: list[Sampled] = []
        num_kept = 0
        for round in range(dynamic):
            rounds.append(self._round(step, round, timer))
            rows = teaching_rows(rounds[-1].batch, wanted - num_kept)
            kept.append(rounds[-1].select(rows))
            num_kept += len(rows) // self.config.algorithm.group_size
            if num_kept == wanted:
                break
        metrics = _metrics(join(rounds))
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
            return Sampled(batch, rounds[-1].names), metrics
        return join([part for part in kept if part.names]), metrics

    def _round(self, step: int, round: int, timer: StepTimer) -> Sampled:
        with timer.phase("generate"):
            problems = next(self.prompts)
            batch, rollouts, names = self.generator.generate(problems, step, round)
        with timer.phase("reward"):
            judged = judge(self.pool, self.tokenizer, problems, rollouts)
            batch = stages.with_rewards(
                batch,
                [j.value for j in judged],
                shuffle_seed=step if self.config.data.reward.shuffle else None,
            )
        return Sampled(batch, names, sum(j.status == "timeout" for j in judged))


def _metrics(seen: Sampled) -> dict[str, float]:
    rewards = step_metrics.reward_metrics(seen.batch, seen.num_timeouts)
    return rewards | step_metrics.rollout_metrics(seen.batch)


def join(parts: Sequence[Sampled]) -> Sampled:
    return Sampled(
        Batch.join([part.batch for part in parts]),
        [name for part in parts for name in part.names],
        sum(part.num_timeouts for part in parts),
    )


def teaching_rows(batch: Batch, most: int) -> list[int]:
    """The sequences of the first ``most`` groups whose scored rewards differ."""
    rewards, group_ids = batch.require("rewards", "group_ids")
    teaching = [g for g in group_ids.unique() if _differ(rewards[group_ids == g])][:most]
    return [row for g in teaching for row in (group_ids == g).nonzero().flatten().tolist()]


def _differ(rewards: Tensor) -> bool:
    scored = rewards[rewards.isfinite()]
    return len(scored) > 0 and bool(scored.min() < scored.max())
