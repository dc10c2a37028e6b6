"""The loop: generate, reward, score, update, sync."""

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from rltrain.algorithms.mismatch import mismatch_metrics
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller import checkpoint, stages
from rltrain.controller.cluster import cluster
from rltrain.controller.engines import engine_spec, start_engines
from rltrain.controller.evaluation import Evaluator, judge
from rltrain.controller.policy_group import PolicyGroup
from rltrain.controller.supervised import warm_started_model
from rltrain.controller.weight_sync import check_weight_sync, sync_weights
from rltrain.data.loader import PromptLoader
from rltrain.data.problems import load_problems
from rltrain.data.tiny_model import build_random_model
from rltrain.environments.pool import RewardPool
from rltrain.policy.types import Scored
from rltrain.rollout.generator import Generator, make_requests
from rltrain.rollout.launch import EngineSpec
from rltrain.tracking.environment import describe_environment, resident_gib
from rltrain.tracking.timers import StepTimer
from rltrain.tracking.tracker import Tracker
from rltrain.weights.architecture import Architecture
from rltrain.weights.engine_fp8 import check_blocks
from rltrain.weights.families import read_architecture

logger = logging.getLogger(__name__)

UPDATE_ROUTING: dict[str, Literal["native", "rollout", "recorded"]] = {
    "off": "native",
    "r2": "recorded",
    "r3": "rollout",
}
"""By ``routing_replay.mode``: whose experts an update uses."""


@dataclass
class Trainer:
    """GRPO (arXiv:2402.03300, algorithm 1) with routing replay (arXiv:2510.11370)."""

    config: Config
    arch: Architecture
    prompts: PromptLoader
    generator: Generator
    pool: RewardPool
    policy: PolicyGroup
    spec: EngineSpec
    evaluator: Evaluator = field(init=False)
    tracker: Tracker = field(init=False)

    def train(self, done: int) -> None:
        """Go on after step ``done``, 0 for a fresh run."""
        self.sync_weights()
        if done == 0 and self.config.trainer.eval_every:
            self.tracker.log(0, self.evaluator.evaluate(0))
        for step in range(done + 1, self.config.trainer.steps + 1):
            self.step(step)

    def step(self, step: int) -> None:
        timer, metrics = StepTimer(), dict[str, float]()
        with timer.phase("generate"):
            problems = next(self.prompts)
            batch, rollouts = self.generator.generate(problems, step)
        with timer.phase("reward"):
            batch = self.reward(batch, problems, rollouts, step, metrics)
            batch = self.fall_back(batch, problems, step, metrics)
        with timer.phase("old_logprobs"):
            self.policy.begin_step(batch)
            batch, scored = self.score(batch, step)
        with timer.phase("native_logprobs"):
            metrics |= self.compare_with_native(batch, scored)
        if self.config.algorithm.kl_coef > 0:
            with timer.phase("ref_logprobs"):
                batch = self.score_reference(batch)
        with timer.phase("advantages"):
            batch = stages.with_advantages(
                batch, self.config.algorithm, self.config.trainer.mini_batches
            )
        with timer.phase("update"):
            metrics |= stages.update_metrics(self.update(batch))
            if self.arch.moe_layers:
                metrics["routing/padded_fraction"] = self.policy.padded_fraction
        with timer.phase("weight_sync"):
            self.sync_weights()
        if self.evaluator.is_due(step):
            with timer.phase("eval"):
                metrics |= self.evaluator.evaluate(step)
        if self.saves(step):
            with timer.phase("checkpoint"):
                self.save(step)
        self.tracker.log(step, metrics | throughput(batch, timer.metrics()))

    # The stages

    def reward(
        self,
        batch: Batch,
        problems: Sequence[Any],
        rollouts: Sequence[Any],
        step: int,
        metrics: dict[str, float],
    ) -> Batch:
        """Judge every response; one whose reward failed leaves the loss."""
        judged = judge(self.pool, self.evaluator.tokenizer, problems, rollouts)
        shuffle = self.config.data.reward.shuffle
        batch = stages.with_rewards(
            batch, [j.value for j in judged], shuffle_seed=step if shuffle else None
        )
        metrics |= stages.reward_metrics(batch, sum(j.status == "timeout" for j in judged))
        metrics |= stages.rollout_metrics(batch, sum(r.finish_reason == "length" for r in rollouts))
        return batch

    def fall_back(
        self, batch: Batch, problems: Sequence[Any], step: int, metrics: dict[str, float]
    ) -> Batch:
        """Where routes are replayed: missing ones cost loss tokens, or end the run."""
        if self.config.routing_replay.mode != "r3":
            return batch
        group_size, seed = self.config.algorithm.group_size, self.config.trainer.seed
        groups = make_requests(problems, group_size, seed, step)
        samples = [str(request) for group in groups for request in group]
        batch, found = stages.with_fallback(batch, self.config.routing_replay, samples)
        metrics |= found
        return batch

    def score(self, batch: Batch, step: int) -> tuple[Batch, Scored | None]:
        """Old log-probabilities: R3 replays the rollout's routes here, R2 records its own.

        With ``algorithm.bypass_old_logprobs`` the rollout's stand in for them, and the pass is made
        on sampled steps alone, for what it measures.
        """
        replay, bypass = self.config.routing_replay, self.config.algorithm.bypass_old_logprobs
        if replay.mode == "r3":
            batch.require("rollout_expert_indices")
        scored = None
        if not bypass or self.measures(batch, step):
            scored = self.policy.score(
                routing="rollout" if replay.mode == "r3" else "native",
                measure=self.measures(batch, step),
                record=replay.mode == "r2" or replay.fallback == "r2",
            )
        if bypass or scored is None:
            return batch.with_fields(old_logprobs=batch.rollout_logprobs), scored
        return batch.with_fields(old_logprobs=scored.logprobs), scored

    def compare_with_native(self, batch: Batch, scored: Scored | None) -> dict[str, float]:
        """How far the trainer is from the rollout: as trained and, on sampled steps, natively."""
        if scored is None:
            return {}
        assert batch.rollout_logprobs is not None
        compared = batch.rollout_logprobs, batch.response_mask
        if scored.agreement is None:
            return mismatch_metrics(scored.logprobs, *compared)
        native = scored
        if self.config.routing_replay.mode == "r3":
            stages.check_overlap(
                scored.agreement,
                self.arch.experts_per_token,
                self.arch.num_experts,
                self.config.routing_replay.min_overlap,
            )
            native = self.policy.score(routing="native", measure=True)
        assert native.agreement is not None
        flipped = native.agreement.flipped
        return {
            **stages.overlap_metrics(scored.agreement, self.arch.experts_per_token),
            **mismatch_metrics(scored.logprobs, *compared, flipped),
            **mismatch_metrics(native.logprobs, *compared, flipped, area="mismatch_native"),
            "routing/flipped_token_fraction": float(flipped[batch.response_mask].float().mean()),
        }

    def measures(self, batch: Batch, step: int) -> bool:
        every = self.config.routing_replay.sample_every
        return batch.rollout_expert_indices is not None and (step - 1) % every == 0

    def score_reference(self, batch: Batch) -> Batch:
        replay = self.config.routing_replay.reference == "replay"
        scored = self.policy.score(routing="rollout" if replay else "native", of="reference")
        return batch.with_fields(ref_logprobs=scored.logprobs)

    def update(self, batch: Batch) -> Any:
        names = ["old_logprobs", "advantages", "loss_weights"]
        names += ["ref_logprobs"] if batch.ref_logprobs is not None else []
        fields = dict(zip(names, batch.require(*names), strict=True))
        return self.policy.update(fields, routing=UPDATE_ROUTING[self.config.routing_replay.mode])

    def saves(self, step: int) -> bool:
        every = self.config.checkpoint.every
        return every > 0 and (step % every == 0 or step == self.config.trainer.steps)

    def save(self, step: int) -> None:
        state = {"prompts": self.prompts.state_dict()}
        checkpoint.save(self.run_dir, step, self.policy, state, self.config.checkpoint.keep)

    def resume(self) -> int:
        """Load this run's newest checkpoint, if asked to and there is one; returns its step."""
        found = checkpoint.checkpoints(self.run_dir)
        if self.config.trainer.resume == "never" or not found:
            return 0
        state = checkpoint.restore(found[-1], self.run_dir, self.policy, self.config.checkpoint)
        self.prompts.load_state_dict(state["prompts"])
        return int(state["step"])

    @property
    def run_dir(self) -> Path:
        return Path(self.config.trainer.output_dir)

    def sync_weights(self) -> None:
        engines, limit = self.generator.engines, self.config.cluster.call_timeout_s
        sync_weights(self.policy, engines, self.config.rollout.dtype, limit)
        if self.config.trainer.check_weight_sync:
            check_weight_sync(self.policy, engines, self.spec, limit)


def run(config: Config) -> None:
    """Start everything a run needs, train, and leave a report whatever happens."""
    with ExitStack() as stack:
        # Bad data ends the run here, before anything that takes long.
        given = Path(config.model.path) if config.model.path else None
        tokenizer = AutoTokenizer.from_pretrained(
            given or build_random_model(config.model),
            trust_remote_code=config.model.trust_remote_code,
        )
        problems = load_problems(config.data, tokenizer, config.model.tiny.warm_start.num_problems)
        if config.rollout.quantization == "fp8":
            arch = read_architecture(given or build_random_model(config.model), config.model.mtp)
            check_blocks(arch, config.rollout.tensor_parallel)
        placed = stack.enter_context(cluster(config))
        path = given or warm_started_model(config, placed)
        arch = read_architecture(path, config.model.mtp, bridge=config.model.bridge)
        # The engines load while the policy workers do.
        spec = engine_spec(config, path, arch, placed)
        engines, wait_until_ready = start_engines(config, spec, placed)
        policy = PolicyGroup(config, str(path), placed.device, placed.policy_options)
        pool = stack.enter_context(RewardPool(config.data.reward))
        generator = Generator(engines, config)
        trainer = Trainer(
            config=config,
            arch=arch,
            prompts=PromptLoader(
                problems.train, config.trainer.prompts_per_step, config.trainer.seed
            ),
            generator=generator,
            pool=pool,
            policy=policy,
            spec=spec,
        )
        done = trainer.resume()
        versions = describe_environment() | {"engine": json.dumps(wait_until_ready()[0])}
        tracker = Tracker(
            Path(config.trainer.output_dir),
            config.tracking,
            config.model_dump(mode="json"),
            versions,
            num_steps=config.trainer.steps,
            first_step=done + 1 if done else 0,
        )
        trainer.tracker = stack.enter_context(tracker)
        trainer.evaluator = Evaluator(
            config, problems.held_out, generator, pool, tokenizer, tracker
        )
        trainer.train(done)


def throughput(batch: Batch, times: dict[str, float]) -> dict[str, float]:
    generated = int(batch.response_mask.sum())
    return times | {
        "throughput/tokens_per_second": batch.num_tokens / times["time/step"],
        "throughput/generated_tokens_per_second": generated / times["time/generate"],
        "memory/host_rss_gib": resident_gib(),
    }
