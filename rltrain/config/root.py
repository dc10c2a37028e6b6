"""The whole configuration and the rules that span its sections."""

from collections.abc import Iterator
from math import ceil
from typing import Any, Self

from pydantic import model_validator

from rltrain.config.algorithm import AlgorithmConfig
from rltrain.config.base import Section
from rltrain.config.critic import CriticConfig
from rltrain.config.data import DataConfig
from rltrain.config.model import ModelConfig
from rltrain.config.optimizer import OptimizerConfig
from rltrain.config.policy import PolicyConfig
from rltrain.config.rollout import RolloutConfig
from rltrain.config.routing import RoutingReplayConfig
from rltrain.config.trainer import CheckpointConfig, ClusterConfig, TrackingConfig, TrainerConfig

UNUSED_BY_SFT = (
    "algorithm",
    "critic",
    "rollout",
    "routing_replay",
    "cluster.placement",
    "data.reward",
    "model.tiny.warm_start",
    "tracking.num_samples",
    "tracking.rollouts_every",
    "trainer.check_weight_sync",
    "trainer.max_staleness",
    "trainer.schedule",
    "trainer.sync_every",
)
"""Keys and sections that supervised steps do not use, except those in `USED_BY_SFT`."""

USED_BY_SFT = ("algorithm.aggregation", "algorithm.type", "rollout.max_response_tokens")


class Config(Section):
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    policy: PolicyConfig = PolicyConfig()
    routing_replay: RoutingReplayConfig = RoutingReplayConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of all rollout engines; 0 for supervised runs, which generate nothing."""
        if self.algorithm.type == "sft":
            return 0
        return self.rollout.num_engines * self.rollout.tensor_parallel

    @property
    def prompts_per_round(self) -> int:
        """Prompts that a step starts to generate for, including those that it may abort."""
        kept = self.trainer.prompts_per_step
        return kept + ceil(self.rollout.oversample * kept)

    @model_validator(mode="after")
    def mini_batches_divide_prompts(self) -> Self:
        prompts, parts = self.trainer.prompts_per_step, self.trainer.mini_batches
        if prompts % parts:
            raise ValueError(
                f"trainer.mini_batches={parts} does not divide trainer.prompts_per_step={prompts}"
                " [RL1004]"
            )
        return self

    @model_validator(mode="after")
    def every_data_parallel_rank_gets_sequences(self) -> Self:
        group = self.algorithm.group_size if self.algorithm.type == "rl" else 1
        sequences = self.trainer.prompts_per_step * group // self.trainer.mini_batches
        if sequences % self.policy.parallel.dp:
            raise ValueError(
                f"policy.parallel.dp={self.policy.parallel.dp} does not divide the {sequences} "
                f"sequences of a mini-batch (trainer.prompts_per_step="
                f"{self.trainer.prompts_per_step} * {group} per prompt / "
                f"trainer.mini_batches={self.trainer.mini_batches})"
                " [RL1004]"
            )
        return self

    @model_validator(mode="after")
    def a_micro_batch_holds_the_longest_sequence(self) -> Self:
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        for key, budget in {
            "max_tokens_per_micro_batch": self.policy.max_tokens_per_micro_batch,
            "max_tokens_per_scoring_micro_batch": self.policy.scoring_tokens,
        }.items():
            if longest > budget:
                raise ValueError(
                    f"policy.{key}={budget} is less than one sequence can take ({longest} = "
                    "data.max_prompt_tokens + rollout.max_response_tokens)"
                    " [RL1005]"
                )
        return self

    @model_validator(mode="after")
    def supervised_steps_use_what_is_set(self) -> Self:
        if self.algorithm.type == "sft" and (ignored := list(_ignored_by_supervised_steps(self))):
            raise ValueError(
                "algorithm.type=sft teaches the data's answers: it samples no responses, rewards "
                "none and has no reference model, so it would ignore "
                f"{', '.join(ignored)}. Leave out what you set; take the default of the rest "
                '(routing_replay="off")'
            )
        return self

    @model_validator(mode="after")
    def a_warm_up_of_the_critic_ends(self) -> Self:
        warmup, steps = self.critic.warmup_steps, self.trainer.steps
        if warmup >= steps:
            raise ValueError(
                f"critic.warmup_steps={warmup} leaves the policy no update in trainer.steps="
                f"{steps}: lower it, or raise trainer.steps"
            )
        return self

    @model_validator(mode="after")
    def what_is_recorded_needs_the_pass_that_records(self) -> Self:
        replay = self.routing_replay
        if self.algorithm.bypass_old_logprobs and replay.min_gate_ratio:
            raise ValueError(
                "algorithm.bypass_old_logprobs=true leaves out the log-probability pass, in which "
                f"routing_replay.min_gate_ratio={replay.min_gate_ratio:g} decides what the update "
                "replays: use min_gate_ratio=0, or recompute the old log-probabilities"
            )
        if self.algorithm.bypass_old_logprobs and "r2" in (replay.mode, replay.fallback):
            raise ValueError(
                "algorithm.bypass_old_logprobs=true leaves out the log-probability pass, in which "
                f"routing_replay.mode={replay.mode}, fallback={replay.fallback} records the "
                "routes that the update replays: use mode=r3 with another fallback, or recompute "
                "the old log-probabilities"
            )
        return self

    @model_validator(mode="after")
    def checkpoints_fall_on_weight_syncs(self) -> Self:
        """A resumed run begins with a sync, so a checkpoint between two syncs would not resume as
        the run was."""
        every = self.checkpoint.every
        if every % self.trainer.sync_every:
            raise ValueError(
                f"checkpoint.every={every} is not a multiple of trainer.sync_every="
                f"{self.trainer.sync_every}: a run could not resume as it was"
            )
        return self

    @model_validator(mode="after")
    def evaluations_fall_on_weight_syncs(self) -> Self:
        """Between two syncs the engines have older weights. An extra sync would give later rollouts
        newer weights, so that evaluation would change the training."""
        every, sync = self.trainer.eval_every, self.trainer.sync_every
        if every % sync:
            near = every // sync * sync
            raise ValueError(
                f"trainer.eval_every={every} is not a multiple of trainer.sync_every={sync}: "
                "evaluations between two syncs would measure older weights than their step's; use "
                f"eval_every={near or sync} or {near + sync}"
            )
        return self

    @model_validator(mode="after")
    def engines_that_run_ahead_share_no_gpu(self) -> Self:
        if self.trainer.max_staleness and self.cluster.placement == "colocated":
            raise ValueError(
                f"trainer.max_staleness={self.trainer.max_staleness} generates while the policy "
                "trains, and with cluster.placement=colocated the two take turns on their GPUs: "
                "use cluster.placement=disaggregated, or trainer.max_staleness=0"
            )
        return self

    @model_validator(mode="after")
    def updates_in_flight_meet_engines_that_run_ahead(self) -> Self:
        if self.rollout.update_in_flight and not self.trainer.max_staleness:
            raise ValueError(
                "rollout.update_in_flight=true: with trainer.max_staleness=0 no engine generates "
                "when the weights are synced: set trainer.max_staleness=1 or more"
            )
        if self.rollout.update_in_flight and self.trainer.check_weight_sync:
            raise ValueError(
                "trainer.check_weight_sync=true compares engines that do not generate, and "
                "rollout.update_in_flight=true never stops them: use one of the two"
            )
        return self

    @model_validator(mode="after")
    def an_adaptive_kl_stays_positive(self) -> Self:
        """A step multiplies the coefficient by at least 1 - 0.2 responses / horizon."""
        kl, prompts = self.algorithm.kl, self.trainer.prompts_per_step
        responses = prompts * self.algorithm.group_size
        if kl.target is not None and responses >= 5 * kl.horizon:
            raise ValueError(
                f"algorithm.kl.horizon={kl.horizon}: the {responses} responses of one step "
                f"(trainer.prompts_per_step={prompts} * algorithm.group_size="
                f"{self.algorithm.group_size}) could take the coefficient to 0 or below: use a "
                f"horizon above {responses // 5}"
            )
        return self

    @model_validator(mode="after")
    def a_replayed_reference_exists(self) -> Self:
        if self.routing_replay.reference == "replay" and (
            self.routing_replay.mode == "off" or self.algorithm.kl.coef == 0
        ):
            raise ValueError(
                f"routing_replay.reference=replay needs routes and a reference model; found "
                f"routing_replay.mode={self.routing_replay.mode} and algorithm.kl.coef="
                f"{self.algorithm.kl.coef}: set mode to r2 or r3 and kl.coef above 0"
            )
        return self


def _ignored_by_supervised_steps(config: Config) -> Iterator[str]:
    """``name=value`` of every unused key whose value is not the default."""
    for name in UNUSED_BY_SFT:
        value: Any = config
        default: Any = Config.model_construct()
        for part in name.split("."):
            value, default = getattr(value, part), getattr(default, part)
        for key, changed in _differences(name, value, default):
            if key not in USED_BY_SFT:
                yield f"{key}={changed}"


def _differences(name: str, value: object, default: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Section):
        if value != default:
            yield name, _plain(value)
        return
    for field in type(value).model_fields:
        yield from _differences(f"{name}.{field}", getattr(value, field), getattr(default, field))


def _plain(value: object) -> object:
    """A dictionary of sections as one writes it."""
    if not isinstance(value, dict):
        return value
    return {k: v.model_dump() if isinstance(v, Section) else v for k, v in value.items()}
