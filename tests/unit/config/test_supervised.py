"""Every key is used by supervised runs, or refused by name where it is not as by default."""

from typing import Any

import pytest

from rltrain.config import Config
from rltrain.config.errors import ConfigError, validate
from rltrain.config.reference import Key, keys
from tests.unit.config.test_schema import nested

USED = (
    "algorithm.aggregation",
    "algorithm.type",
    "checkpoint.",
    "cluster.",
    "data.",
    "model.",
    "optimizer.",
    "policy.",
    "rollout.max_response_tokens",
    "tracking.",
    "trainer.",
)
"""As tests/integration/test_supervised.py runs them, or because workers and tracker are RL's."""

UNUSED = (
    "algorithm.",
    "cluster.placement",  # of engines
    "critic.",
    "data.reward.",
    "model.tiny.warm_start.",  # a supervised run starts from the model before it
    "rollout.",
    "routing_replay.",
    "tracking.num_samples",
    "trainer.check_weight_sync",
    "trainer.sync_every",
)

RIGHT = {"right": {"function": "exact", "weight": 1.0, "success_at": None}}

OTHER: dict[str, Any] = {
    "algorithm.advantage": "rloo",
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.9,
    "algorithm.loss": "gspo",
    "algorithm.kl.target": 0.1,
    "algorithm.correction.reject_min": 0.1,
    "algorithm.correction.veto": 1e-4,
    "algorithm.correction.weight_min": 0.1,
    "algorithm.dual_clip": 3.0,
    "critic.optimizer.min_lr": 1e-6,
    "critic.value_clip": None,
    "data.reward.components": RIGHT,
    "data.reward.correct_from": "right",
    "data.reward.env": {"TZ": "UTC"},
    "data.reward.token_env": "JUDGE_TOKEN",
    "data.reward.function": "math_verify",
    "rollout.engine_args": {"max_num_seqs": 8},
    "rollout.gpu_memory_utilization": 0.3,
    "rollout.stop": ["a"],
    "rollout.stop_token_ids": [1],
    "routing_replay.max_sample_fallback": 0.3,
}
"""A value that is allowed and not the default, where it cannot be made of the default."""

NEEDED = {
    "algorithm.kl.target": {"algorithm.kl.coef": 0.1},
    "algorithm.kl.refresh_every": {"algorithm.kl.coef": 0.1},
    "critic.optimizer.min_lr": {"critic.optimizer.schedule": "linear"},
    "routing_replay.fallback": {"routing_replay.mode": "r3"},
    "routing_replay.max_age": {"routing_replay.mode": "r3", "routing_replay.fallback": "live"},
    "routing_replay.min_gate_ratio": {"routing_replay.mode": "r3"},
    "routing_replay.reference": {"routing_replay.mode": "r3", "algorithm.kl.coef": 0.1},
    "data.reward.token_env": {"data.reward.function": "http://judge/score"},
    "data.reward.correct_from": {"data.reward.components": RIGHT},
    "rollout.expert_parallel": {"rollout.tensor_parallel": 2},
    "rollout.kv_cache_on_update": {"rollout.update_in_flight": True},
}
"""What a key must come with to be allowed at all."""


def is_in(name: str, table: tuple[str, ...]) -> bool:
    return any(name.startswith(entry) if entry.endswith(".") else name == entry for entry in table)


def is_used(key: Key) -> bool:
    listed = [e for table in (USED, UNUSED) for e in table if is_in(key.name, (e,))]
    return max(listed, key=len) in USED


def other_than(key: Key) -> Any:
    """A value that is allowed and not the default."""
    if key.name in OTHER:
        return OTHER[key.name]
    choices = [c.strip() for c in key.type.removeprefix("one of ").split(",")]
    if key.type.startswith("one of "):
        return next(c for c in choices if c.removesuffix(" or null") != key.default)
    if isinstance(key.default, bool):
        return not key.default
    if key.default is None:
        return True if "true or false" in key.type else 3
    if isinstance(key.default, int | float):
        return key.default + 1 if not isinstance(key.default, float) else key.default / 2 + 0.25
    raise AssertionError(f"give OTHER a value for {key.name} ({key.type})")


def test_every_key_is_in_a_table() -> None:
    for key in keys():
        assert is_in(key.name, USED) or is_in(key.name, UNUSED), key.name


@pytest.mark.parametrize("key", [k for k in keys() if not is_used(k)], ids=lambda k: k.name)
def test_what_is_not_used_is_refused_by_name(key: Key) -> None:
    value = other_than(key)
    assert value != key.default, f"give OTHER another value for {key.name}"
    with pytest.raises(ConfigError) as refused:
        validate(nested({"algorithm.type": "sft", key.name: value} | NEEDED.get(key.name, {})))
    assert f"{key.name}={value}" in str(refused.value)
    assert "supervised steps use what is set" in str(refused.value)


def test_what_is_used_is_taken() -> None:
    values = {
        "algorithm.type": "sft",
        "algorithm.aggregation": "constant",
        "rollout.max_response_tokens": 30,
        "checkpoint.every": 5,
        "trainer.eval_every": 3,
        "trainer.mini_batches": 4,
        "trainer.invariants": "warn",
        "data.eval_size": 7,
        "optimizer.freeze_router": True,
        "policy.parallel.tp": 2,
    }
    config = validate(nested(values))
    assert config.checkpoint.every == 5
    assert validate({"algorithm": {"type": "sft"}}) == Config.model_validate(
        {"algorithm": {"type": "sft"}}
    )


def test_all_that_is_ignored_is_named_at_once() -> None:
    values = {"algorithm.type": "sft", "rollout.temperature": 0.7, "critic.optimizer.lr": 1.0}
    with pytest.raises(ConfigError) as refused:
        validate(nested(values))
    assert "critic.optimizer.lr=1.0, rollout.temperature=0.7." in str(refused.value)
