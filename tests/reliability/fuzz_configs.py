"""Configurations by the schema: one that is impossible is refused in words, before anything starts;
one that is possible comes back from its file, and Hydra composes it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltrain.config.errors import ConfigError, validate
from rltrain.config.reference import Key, keys
from rltrain.config.saved_config import load_config, save_config
from rltrain.main import compose
from tests.reliability import mutations
from tests.unit.config.test_schema import nested

ALL = list(keys())
NUMBERS = (0, 1, 2, 3, 4, 8, 16, 64, 0.1, 0.5, 0.9, 1.0, 2.0, 1e-3)
TEXTS = ("x", "a.b", "/tmp/x", "answer", "prompt", "step:4", "auto", "never", "bfloat16", "float32")


def make(folder: Path) -> Callable[[random.Random], str]:
    def try_one(dice: random.Random) -> str:
        values = nested({key.name: likely(dice, key) for key in dice.sample(ALL, size(dice))})
        if dice.random() < 0.3:
            values = mutations.changed(dice, values)
        try:
            config = validate(values)
        except ConfigError as error:
            check_message(error)
            return "refused"
        trainer = config.trainer.model_copy(update={"output_dir": str(folder), "resume": "never"})
        config = config.model_copy(update={"trainer": trainer})
        save_config(config, "fuzz", [])
        assert load_config(folder) == config
        return "valid"

    return try_one


def make_command_lines(_: Path) -> Callable[[random.Random], str]:
    def try_one(dice: random.Random) -> str:
        chosen = dice.sample(ALL, min(size(dice), 3))
        arguments = [f"{key.name}={spelt(likely(dice, key))}" for key in chosen]
        if dice.random() < 0.4:
            at = dice.randrange(len(arguments))
            text = mutations.damaged(dice, arguments[at].encode(errors="replace")[:200]).decode(
                errors="replace"
            )
            arguments[at] = text
        try:
            config = compose(["+recipe=grpo_moe_r3", *arguments])
        except ConfigError as error:
            check_message(error)
            return "refused"
        assert validate(config.model_dump(mode="json")) == config
        return "composed"

    return try_one


def size(dice: random.Random) -> int:
    return dice.choice([1, 1, 2, 3, 6])


def likely(dice: random.Random, key: Key) -> Any:
    """Mostly a value of the kind that the key takes."""
    kind = dice.random()
    if kind < 0.15:
        return mutations.leaf(dice)
    if kind < 0.3:
        return key.default
    if key.choices:
        return dice.choice(key.choices)
    if "true or false" in key.type:
        return dice.random() < 0.5
    if "integer" in key.type:
        return dice.choice(NUMBERS[:8])
    return dice.choice(NUMBERS if "number" in key.type else TEXTS)


def spelt(value: Any) -> str:
    """As it is typed after the equals sign; not always with the quotes that it would need."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_message(error: ConfigError) -> None:
    text = str(error)
    assert "[RL" in text, f"no code: {text[:300]}"
    assert "Traceback" not in text and "pydantic" not in text, text[:300]
