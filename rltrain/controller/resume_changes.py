"""What was changed between a checkpoint and the configuration of the run that goes on from it.

`FREE` keys say where and how fast a run computes, how long it runs, and what it writes. `MEANING`
keys say what is learned, from what and towards what: with other values, the optimizer's state, the
position in the data and the curves so far belong to another experiment. A name that ends in a dot
is a section. The longest entry that a key is in counts.
"""

import logging
from collections.abc import Mapping
from typing import Any

from rltrain.config import Config
from rltrain.config.differences import ABSENT, flatten
from rltrain.config.redact import redacted

logger = logging.getLogger(__name__)

FREE = (
    *("checkpoint.", "cluster.", "critic.placement", "tracking."),
    *("model.cache_dir", "model.path", "model.weights", "model.trust_remote_code"),
    *("data.path", "data.reward.num_workers", "data.reward.timeout_s"),
    *("data.reward.max_failed_fraction", "data.reward.limits.", "data.limits."),
    "data.reward.token_env",
    *("trainer.steps", "trainer.eval_every", "trainer.output_dir", "trainer.invariants"),
    *("trainer.resume", "trainer.resume_with_changes", "trainer.check_weight_sync"),
    *("trainer.on_nonfinite", "trainer.max_skipped_steps", "trainer.schedule"),
    *("trainer.max_restarts", "trainer.restart_window_s", "trainer.grace_s"),
    *("rollout.num_engines", "rollout.tensor_parallel", "rollout.expert_parallel"),
    *("rollout.enforce_eager", "rollout.weight_transfer", "rollout.kv_cache_gib"),
    "rollout.gpu_memory_utilization",
    *("policy.parallel.", "policy.max_tokens_per_micro_batch", "policy.kept_softmax_gib"),
    "policy.max_tokens_per_scoring_micro_batch",
    *("policy.recompute", "policy.recompute_modules", "policy.recompute_method"),
    *("policy.recompute_num_layers", "policy.dispatcher", "policy.overlap_grad_reduce"),
    *("policy.transformer_engine", "policy.threads"),
    *("routing_replay.capture", "routing_replay.sample_every", "routing_replay.min_overlap"),
    *("routing_replay.gate", "routing_replay.trace"),
)
"""A model and data elsewhere are the same by their content, which is compared (RL6003, RL6006)."""

MEANING = (
    *("algorithm.", "critic.value_clip", "critic.warmup_steps", "critic.optimizer."),
    *("optimizer.", "model.tiny.", "model.mtp"),
    *("data.source", "data.name", "data.split", "data.size", "data.seed", "data.repeat_in_step"),
    *("data.eval_path", "data.eval_split", "data.eval_size", "data.eval_on_train"),
    *("data.prompt_column", "data.as_chat", "data.answer_column", "data.answer_pattern"),
    *("data.last_turn", "data.tools_column", "data.template_args", "data.task"),
    *("data.task_options", "data.max_prompt_tokens", "data.on_long_prompt", "data.on_bad_row"),
    *("data.reward.function", "data.reward.text", "data.reward.success_at", "data.reward.shuffle"),
    *("data.reward.components", "data.reward.correct_from", "data.reward.env"),
    *("trainer.prompts_per_step", "trainer.mini_batches", "trainer.seed", "trainer.sync_every"),
    "trainer.max_staleness",
    *("rollout.dtype", "rollout.quantization", "rollout.head", "rollout.max_response_tokens"),
    *("rollout.stop", "rollout.stop_token_ids", "rollout.temperature", "rollout.deterministic"),
    *("rollout.oversample", "rollout.seeded", "rollout.engine_args", "rollout.update_in_flight"),
    "rollout.kv_cache_on_update",
    *("policy.precision.", "policy.megatron_args"),
    *("routing_replay.mode", "routing_replay.reference", "routing_replay.fallback"),
    *("routing_replay.max_age", "routing_replay.min_gate_ratio"),
    *("routing_replay.max_sample_fallback", "routing_replay.max_batch_fallback"),
)

UNTOLD = ("trainer.resume", "trainer.resume_with_changes", "trainer.output_dir")
"""What every resumed run sets."""

Changes = Mapping[str, tuple[Any, Any]]
"""By key, the earlier value and the one now."""


def settings_of(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of its run's configuration."""
    settings: dict[str, Any] = redacted(config.model_dump(mode="json"))
    return settings


def changes_since(saved: Mapping[str, Any], config: Config) -> Changes:
    """The keys that have other values than in ``saved``, as `settings_of` an earlier run.

    A key that ``saved`` lacks had its default; one that there is no more is left out.
    """
    now = flatten(settings_of(config))
    before = {**flatten(settings_of(Config())), **flatten(saved)}
    pairs = {key: (before.get(key, ABSENT), now.get(key, ABSENT)) for key in before | now}
    return {
        key: pair
        for key, pair in pairs.items()
        # An empty dictionary says nothing beside the keys in the other one.
        if pair[0] != pair[1] and {} not in pair and key not in UNTOLD and is_marked(key)
    }


def check_changes(changes: Changes, config: Config, step: int) -> None:
    """Show the changes.

    Raises:
        ValueError: some change what the checkpoint of ``step`` means, and
            ``trainer.resume_with_changes`` is not set.
    """
    lines = {
        key: f"{key}: {old} until step {step}, {new} now" for key, (old, new) in changes.items()
    }
    meant = [key for key in changes if changes_meaning(key, config)]
    if meant and not config.trainer.resume_with_changes:
        listed = "\n".join(f"  {lines[key]}" for key in meant)
        raise ValueError(
            f"trainer.resume={config.trainer.resume}: expected the settings with which the "
            f"checkpoint of step {step} was written, found others:\n{listed}\nGo on with the "
            "earlier values, or set trainer.resume_with_changes=true to go on with these, or start "
            "anew in another trainer.output_dir [RL6015]"
        )
    for line in lines.values():
        logger.info("changed: %s", line)


def changes_meaning(key: str, config: Config) -> bool:
    """Whether another value of ``key`` makes it another experiment.

    A falling learning rate depends on the number of steps.
    """
    if key == "trainer.steps":
        schedules = {config.optimizer.schedule, config.critic.optimizer.schedule}
        return schedules != {"constant"}
    return _longest(key, MEANING) > _longest(key, FREE)


def is_marked(key: str) -> bool:
    """Whether it is a key of the schema, or below one that is a dictionary."""
    return max(_longest(key, MEANING), _longest(key, FREE)) > 0


def _longest(key: str, table: tuple[str, ...]) -> int:
    """Characters of the longest entry that ``key`` is in; 0 without one."""
    inside = [e for e in table if f"{key}.".startswith(e if e.endswith(".") else f"{e}.")]
    return max(map(len, inside), default=0)
