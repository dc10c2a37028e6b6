"""A step of reinforcement learning: generate, reward, score, update, sync."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from rltrain.actors.failures import meanwhile
from rltrain.algorithms.advantages import critic_only_steps
from rltrain.algorithms.kl import adapted_coef
from rltrain.algorithms.mismatch import k3_by_age, mismatch_metrics
from rltrain.algorithms.sequences import require_finite
from rltrain.batch import Batch
from rltrain.controller import stages, step_metrics
from rltrain.controller.checks import route_gate
from rltrain.controller.checks.first_step import Check, FirstStep, check_first_step
from rltrain.controller.checks.precision_bounds import engine_precision, trainer_precision
from rltrain.controller.cluster.colocation import Colocation
from rltrain.controller.cluster.critic_group import CriticGroup
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.controller.engine_restarts import EngineRestarts
from rltrain.controller.nonfinite import InHand
from rltrain.controller.pipeline import RolloutPipeline
from rltrain.controller.rollout_rows import keeps_rollouts, rollout_rows
from rltrain.controller.run_loop import Loop, Step
from rltrain.controller.sampling import Sampled
from rltrain.controller.weight_sync import WeightSync, check_weight_sync, is_sync_due
from rltrain.policy.types import Agreement, Scored, Updated
from rltrain.rollout.launch import EngineSpec
from rltrain.tracking.timers import StepTimer
from rltrain.weights.architecture.decoder import Architecture

logger = logging.getLogger(__name__)

UPDATE_ROUTING: dict[str, Literal["native", "rollout", "recorded"]] = {
    "off": "native",
    "r2": "recorded",
    "r3": "rollout",
}
"""By ``routing_replay.mode``: whose experts an update uses."""


@dataclass
class Trainer(Loop):
    """GRPO (arXiv:2402.03300, algorithm 1) and its kin with routing replay (arXiv:2510.11370)."""

    arch: Architecture
    pipeline: RolloutPipeline
    spec: EngineSpec
    placed: Cluster
    weight_sync: WeightSync
    engine_restarts: EngineRestarts
    colocation: Colocation
    kl_coef: float
    """Of the next step."""

    def begin(self) -> dict[str, float]:
        step = self.start.after
        metrics = self.sync_weights(step, StepTimer(on_phase=self.tracker.phase))
        return (metrics if self.syncs(step) else {}) | self.restarts_so_far

    def take(self, step: int, timer: StepTimer, *, is_first: bool) -> Step:
        sampled, metrics = self.pipeline.take(step, timer)
        if self.pipeline.is_ahead:  # the engines go on until the weights are synced
            self._in_step.enter_context(meanwhile(self.pipeline.work))
        batch, measured = self.fall_back(step, sampled.batch, sampled.names)
        metrics |= measured
        self.colocation.to_training(timer, will_sync=self.syncs(step))
        self.in_hand = InHand(batch, metrics, self.kl_coef)
        with timer.phase("old_logprobs"):
            self.policy.begin_step(batch)
            metrics |= step_metrics.link_metrics(batch, self.policy.route_links)
            self.tracker.links(step, "routes", self.policy.route_links)
            batch, scored = self.score(batch, step)
            if scored is not None:
                metrics |= step_metrics.replayed_metrics(scored)
        with timer.phase("native_logprobs"):
            is_fresh = metrics["rollout/staleness_max"] == 0
            measured, flipped = self.compare_with_native(batch, scored, is_fresh=is_fresh)
            metrics |= measured
            if self.pipeline.is_ahead and scored is not None:
                metrics |= self.compare_by_age(step, batch, scored)
        paired = None
        if self.config.algorithm.kl.coef > 0:
            with timer.phase("ref_logprobs"):
                batch = self.score_reference(batch)
                # The first step's check needs it. The step may end with another reference.
                paired = self.pair_reference(batch) if is_first else None
        if self.critic is not None:
            with timer.phase("values"):
                self.critic.begin_step(batch)
                batch = batch.with_fields(values=self.critic.values())
        with timer.phase("advantages"):
            self.in_hand = InHand(batch, metrics, self.kl_coef)
            batch, measured = self.compute_advantages(batch)
            metrics |= measured
        self.in_hand = InHand(batch, metrics, self.kl_coef)
        self.keep_rollouts(step, replace(sampled, batch=batch), scored, flipped)
        self.finish_first()
        if self.critic is not None:
            with timer.phase("critic_update"):
                metrics |= self.update_critic(self.critic, batch)
        updates: list[Updated] = []
        if step > critic_only_steps(self.config):
            with timer.phase("update"):
                updates = self.update(batch)
                counted = self.config.trainer.mini_batches - len(self.policy.unmade)
                metrics |= step_metrics.update_metrics(updates, counted)
                metrics |= step_metrics.mismatch_over_entropy(metrics)
                if self.arch.moe_layers:
                    metrics["routing/padded_fraction"] = self.policy.padded_fraction
        metrics |= self.adapt_reference(step, batch, metrics)
        return Step(batch, metrics, updates, scored, paired)

    def hand_over(self, step: int, timer: StepTimer) -> dict[str, float]:
        """The engines' turn: with new weights, or with those they have."""
        metrics: dict[str, float] = {}
        if self.pipeline.is_ahead and not self.config.rollout.update_in_flight:
            with timer.phase("drain"):
                self.pipeline.drain()
        if self.syncs(step):
            metrics = self.sync_weights(step, timer)
        else:
            self.colocation.to_engines(timer)
        assert self.pipeline.synced_after == step or not self.evaluator.is_due(step), (
            "an evaluation measures the weights of its step"
        )
        return metrics | self.restarts_so_far

    @property
    def restarts_so_far(self) -> dict[str, float]:
        return {"rollout/engine_restarts": float(self.engine_restarts.count)}

    @property
    def update_routing(self) -> Literal["native", "rollout", "recorded"]:
        """Whose experts an update uses."""
        replay = self.config.routing_replay
        return "recorded" if replay.min_gate_ratio else UPDATE_ROUTING[replay.mode]

    # The stages

    def fall_back(
        self, step: int, batch: Batch, names: Sequence[str]
    ) -> tuple[Batch, dict[str, float]]:
        """Where routes are replayed: missing ones cost loss tokens, or end the run; those of older
        weights are left out."""
        replay = self.config.routing_replay
        if replay.mode != "r3":
            return batch, {}
        batch, metrics = stages.with_fallback(batch, replay, names)
        if replay.max_age is not None:
            ages = self.pipeline.token_ages(step, batch)
            batch, measured = stages.without_older_routes(batch, ages, replay.max_age)
            metrics |= measured
        return batch, metrics

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
                record=replay.mode == "r2" or replay.fallback == "r2" or replay.min_gate_ratio > 0,
            )
            require_finite("old_logprobs", scored.logprobs, batch.response_mask, batch.seq_lens)
        if bypass or scored is None:
            return batch.with_fields(old_logprobs=batch.rollout_logprobs), scored
        return batch.with_fields(old_logprobs=scored.logprobs), scored

    def compare_with_native(
        self, batch: Batch, scored: Scored | None, *, is_fresh: bool
    ) -> tuple[dict[str, float], Tensor | None]:
        """How far the trainer is from the rollout: as trained and, on sampled steps, natively; and
        which tokens are flipped, where that was measured.

        Args:
            is_fresh: whether the rollout had the policy's weights. Older ones route otherwise for a
                good reason, so no gate judges their routes.
        """
        if scored is None:
            return {}, None
        assert batch.rollout_logprobs is not None
        compared = batch.rollout_logprobs, batch.response_mask, batch.seq_lens
        if scored.agreement is None:
            return mismatch_metrics(scored.logprobs, *compared), None
        native, wide = scored, {}
        if self.config.routing_replay.mode == "r3" and is_fresh:
            stages.check_overlap(
                scored.agreement,
                self.arch.experts_per_token,
                self.arch.num_experts,
                self.config.routing_replay.min_overlap,
            )
        if scored.agreement.flips:
            wide = self.check_route_margins(batch, scored.agreement, is_fresh=is_fresh)
        if self.config.routing_replay.mode == "r3":
            native = self.policy.score(routing="native", measure=True)
        assert native.agreement is not None
        flipped = native.agreement.flipped
        metrics = {
            **step_metrics.overlap_metrics(scored.agreement, self.arch.experts_per_token),
            **wide,
            **step_metrics.load_metrics(scored.agreement.load),
            **mismatch_metrics(scored.logprobs, *compared, flipped),
            **mismatch_metrics(native.logprobs, *compared, flipped, area="mismatch_native"),
            "routing/flipped_token_fraction": float(flipped[batch.response_mask].float().mean()),
        }
        return metrics, flipped

    def compare_by_age(self, step: int, batch: Batch, scored: Scored) -> dict[str, float]:
        (rollout,) = batch.require("rollout_logprobs")
        ages = self.pipeline.token_ages(step, batch)
        return k3_by_age(scored.logprobs, rollout, batch.response_mask, batch.seq_lens, ages)

    def check_route_margins(
        self, batch: Batch, agreement: Agreement, *, is_fresh: bool
    ) -> dict[str, float]:
        """In mode ``r3``, end the run if the rollout's routes are systematically wrong.

        Raises:
            RuntimeError: naming layer, column, sample, expert or part of the samples, where
                ``routing_replay.gate=stop``.
        """
        replay = self.config.routing_replay
        noise = route_gate.noise_scales(agreement)
        flips = self.policy.wide_flips(route_gate.narrow_bins(agreement, noise))
        if replay.mode == "r3" and is_fresh:
            wrong = route_gate.wrong_routes(batch, agreement, flips, self.arch.experts_per_token)
            if wrong is not None and replay.gate == "stop":
                raise RuntimeError(
                    f"{wrong}. routing_replay.gate=warn goes on all the same [RL5003]"
                )
            if wrong is not None:
                logger.warning("%s", wrong)
        return route_gate.flip_metrics(agreement, noise, flips)

    def measures(self, batch: Batch, step: int) -> bool:
        if batch.rollout_expert_indices is None or batch.route_mask is None:
            return False
        is_due = (step - 1) % self.config.routing_replay.sample_every == 0
        return is_due and bool(batch.route_mask.any())  # all may be older than max_age

    def score_reference(self, batch: Batch) -> Batch:
        """By default natively; ``routing_replay.reference=replay`` uses the policy's routes."""
        native = self.config.routing_replay.reference == "native"
        routing = "native" if native else self.update_routing
        scored = self.policy.score(routing=routing, of="reference")
        require_finite("ref_logprobs", scored.logprobs, batch.response_mask, batch.seq_lens)
        return batch.with_fields(ref_logprobs=scored.logprobs)

    def pair_reference(self, batch: Batch) -> Batch | None:
        """``batch`` with a reference that was scored as the policy was: a fresh run's is the same
        model. None where the policy was not scored at all."""
        replay = self.config.routing_replay
        if self.config.algorithm.bypass_old_logprobs or self.start.after:
            return None
        if replay.mode != "r3" or replay.reference == "replay":
            return batch
        scored = self.policy.score(routing="rollout", of="reference")
        return batch.with_fields(ref_logprobs=scored.logprobs)

    def compute_advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Of every token: its advantage, and its weight in the loss."""
        return stages.with_signal(batch, self.config, self.kl_coef)

    def keep_rollouts(
        self, step: int, sampled: Sampled, scored: Scored | None, flipped: Tensor | None
    ) -> None:
        """On chosen steps, some rollouts token by token, before an update that may fail."""
        tracking = self.config.tracking
        if keeps_rollouts(tracking, step, self.config.trainer.steps):
            rows = rollout_rows(
                sampled,
                tracking.num_samples,
                self.pipeline.sampler.tokenizer,
                trainer_logprobs=None if scored is None else scored.logprobs,
                flipped=flipped,
            )
            self.tracker.rollouts(step, rows)

    def update(self, batch: Batch) -> list[Updated]:
        fields = stages.policy_fields(batch)
        routing = self.update_routing
        self.weight_sync.outdate()
        return self.policy.update(fields, routing=routing, kl_coef=self.kl_coef)

    def update_critic(self, critic: CriticGroup, batch: Batch) -> dict[str, float]:
        updates = critic.update(stages.critic_fields(batch))
        return step_metrics.value_metrics(batch, updates)

    def adapt_reference(
        self, step: int, batch: Batch, metrics: dict[str, float]
    ) -> dict[str, float]:
        """The KL's coefficient of the next step, and its reference."""
        kl = self.config.algorithm.kl
        if kl.coef == 0:
            return {}
        used = self.kl_coef
        if kl.target is not None and "policy/ref_kl" in metrics:
            self.kl_coef = adapted_coef(
                used,
                metrics["policy/ref_kl"],
                batch.num_sequences,
                target=kl.target,
                horizon=kl.horizon,
            )
        if kl.refresh_every and step % kl.refresh_every == 0:
            self.policy.refresh_reference()
        return {"policy/kl_coef": used}

    def first_checks(self, taken: Step) -> list[Check]:
        first = FirstStep(
            batch=taken.batch,
            updates=taken.updates,
            metrics=taken.metrics,
            scored=None if taken.scored is None else taken.scored.logprobs,
            is_fresh=self.start.after == 0,
            paired=taken.paired,
            native_losses=self.policy.native_losses(),
            precision=trainer_precision(self.config, self.spec.device),
            engine_precision=engine_precision(self.config, self.spec.device),
            vocab_size=self.arch.vocab_size,
            has_experts=bool(self.arch.moe_layers),
        )
        return check_first_step(first, self.config)

    def syncs(self, step: int) -> bool:
        evaluates = self.evaluator.is_due(step)
        return is_sync_due(self.config.trainer, step, evaluates=evaluates)

    def is_aside(self) -> bool:
        return self.colocation.colocated  # the interruption may have come while engines generated

    def state(self) -> dict[str, Any]:
        return super().state() | {"prompts": self.pipeline.cursor, "kl_coef": self.kl_coef}

    def sync_weights(self, step: int, timer: StepTimer) -> dict[str, float]:
        """Bring the weights after ``step`` into the engines, whose turn it is then."""
        with self.colocation.weight_sync(timer):
            self.engine_restarts.complete()
            metrics = self.weight_sync.sync(self.config.rollout.dtype)
        self.pipeline.synced(step, self.weight_sync.version)
        if self.config.trainer.check_weight_sync:
            options = self.placed.engine_options(0, log="fresh-engine")
            disks, node = self.start.storage.disks, self.placed.engine_nodes[0]
            width = 1 if self.config.rollout.quantization == "fp8" else 4
            nbytes = width * self.planned.parameters
            check_weight_sync(self.colocation, self.spec, options, disks, node, nbytes)
        return metrics
