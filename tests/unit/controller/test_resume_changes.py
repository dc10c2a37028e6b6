"""Every key either changes what a checkpoint means or is free, and changes of the first kind stop a
run."""

import logging
from typing import Any

import pytest
import yaml

from rltrain.config import Config
from rltrain.config.reference import keys
from rltrain.controller.resume_changes import (
    FREE,
    MEANING,
    changes_meaning,
    changes_since,
    check_changes,
    is_marked,
    settings_of,
)
from tests.unit.config.test_schema import nested

NAMES = [key.name for key in keys()]
DICTIONARIES = [key.name for key in keys() if key.free]
ASKED = ("algorithm.type", "algorithm.group_size", "algorithm.advantage", "optimizer.lr")
ASKED += ("optimizer.schedule", "data.reward.function", "model.tiny.num_layers", "data.source")
ASKED += ("trainer.prompts_per_step", "trainer.seed", "routing_replay.mode", "rollout.temperature")


def config(**dotted: Any) -> Config:
    return Config.model_validate(nested({k.replace("__", "."): v for k, v in dotted.items()}))


def entries_of(name: str) -> list[str]:
    return [
        entry
        for entry in (*FREE, *MEANING)
        if name == entry or (entry.endswith(".") and name.startswith(entry))
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_marked_once(name: str) -> None:
    assert is_marked(name)
    assert len(entries_of(name)) == 1


def test_every_mark_is_of_a_key() -> None:
    marked = {entry for name in NAMES for entry in entries_of(name)}
    assert marked == {*FREE, *MEANING}


def test_what_is_learned_is_no_free_choice() -> None:
    assert [name for name in ASKED if not changes_meaning(name, Config())] == []
    free = ("trainer.steps", "tracking.project", "policy.parallel.tp", "checkpoint.keep")
    assert [name for name in free if changes_meaning(name, Config())] == []
    assert changes_meaning("rollout.engine_args.kv_cache_dtype", Config())


def test_the_end_of_a_falling_learning_rate_is_no_free_choice() -> None:
    assert changes_meaning("trainer.steps", config(optimizer__schedule="cosine"))
    assert changes_meaning("trainer.steps", config(critic__optimizer__schedule="linear"))


def test_the_same_configuration_has_no_changes() -> None:
    now = config(trainer__resume="auto", trainer__output_dir="/run", optimizer__lr=1)
    before = config(trainer__output_dir="run", optimizer__lr=1.0)
    assert changes_since(settings_of(before), now) == {}
    saved = yaml.safe_load(yaml.safe_dump(settings_of(before)))
    assert changes_since(saved, now) == {}


def test_what_an_older_version_did_not_know_had_its_default() -> None:
    saved = settings_of(Config())
    del saved["trainer"]["sync_every"]
    saved["model"]["bridge"] = False  # there is no such key any more
    assert changes_since(saved, Config()) == {}
    assert changes_since(saved, config(trainer__sync_every=2, trainer__eval_every=10)) == {
        "trainer.sync_every": (1, 2)
    }


@pytest.mark.parametrize("name", DICTIONARIES)
def test_a_key_below_a_dictionary_is_told(name: str) -> None:
    if "megatron" in name or name == "data.reward.components":
        return
    with_one = config(**{name: {"NAME": 1}})
    assert changes_since(settings_of(Config()), with_one) == {f"{name}.NAME": ("not set", 1)}
    assert changes_since(settings_of(with_one), Config()) == {f"{name}.NAME": (1, "not set")}


def test_another_weight_of_a_component_is_another_experiment() -> None:
    parts = {"right": {"function": "exact"}, "brief": {"function": "r.py:f", "weight": 0.5}}
    before = config(data__reward__components=parts)
    parts["brief"] = parts["brief"] | {"weight": 0.25}
    now = config(data__reward__components=parts)
    changes = changes_since(settings_of(before), now)
    assert changes == {"data.reward.components.brief.weight": (0.5, 0.25)}
    assert all(changes_meaning(key, now) for key in changes)


def test_changes_are_told_and_stop_unless_they_are_meant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    saved = settings_of(Config())
    changed = {"trainer__steps": 600, "optimizer__lr": 1e-5, "algorithm__group_size": 8}
    stopped = config(**changed)
    with pytest.raises(ValueError, match="RL6015") as refused:
        check_changes(changes_since(saved, stopped), stopped, 20)
    lines = str(refused.value).splitlines()
    assert lines[1:-1] == [
        "  algorithm.group_size: 16 until step 20, 8 now",
        "  optimizer.lr: 1e-06 until step 20, 1e-05 now",
    ]
    assert "trainer.resume_with_changes=true" in lines[-1]
    assert caplog.messages == []
    meant = config(**changed, trainer__resume_with_changes=True)
    check_changes(changes_since(saved, meant), meant, 20)
    assert caplog.messages == [
        "changed: algorithm.group_size: 16 until step 20, 8 now",
        "changed: optimizer.lr: 1e-06 until step 20, 1e-05 now",
        "changed: trainer.steps: 500 until step 20, 600 now",
    ]


def test_no_secret_is_shown_or_kept() -> None:
    secret = config(cluster__env={"HF_TOKEN": "s3cr3t"})
    assert "s3cr3t" not in str(settings_of(secret))
    other = config(cluster__env={"HF_TOKEN": "another"})
    assert changes_since(settings_of(secret), other) == {}
