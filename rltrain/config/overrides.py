"""Checks overrides of the command line before Hydra composes them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rltrain.config.errors import ConfigError, nearest, unknown_key
from rltrain.config.hydra_groups import Groups
from rltrain.config.reference import keys, sections, show


@dataclass(frozen=True)
class Override:
    """One argument such as ``trainer.steps=5``, ``data=jsonl`` or ``+recipe=grpo_moe_r3``."""

    name: str
    value: object
    sign: str
    """Prefix of the name: empty, ``+``, ``++`` or ``~``."""


def check_overrides(overrides: Sequence[Override], groups: Groups) -> None:
    """Reject overrides that name nothing, or that Hydra would read as something else.

    Raises:
        ConfigError: names the override, the nearest valid name and how to write it.
    """
    for override in overrides:
        check_one(override, groups)
    chosen = Counter(override.name for override in overrides if override.name in groups)
    for name, times in chosen.items():
        if times > 1:
            raise ConfigError(f"{name}: expected one choice, found {times} [RL1008]")


def check_one(override: Override, groups: Groups) -> None:
    name, value = override.name, override.value
    if override.sign == "~":
        raise ConfigError(
            f"~{name}: nothing can be taken out: set {name} to another value [RL1006]"
        )
    if isinstance(value, dict) and name in set(sections()):
        for key, inner in value.items():
            check_one(Override(f"{name}.{key}", inner, override.sign), groups)
    elif name in groups:
        check_choice(override, groups[name])
    else:
        check_key(override, groups)


def check_choice(override: Override, options: Iterable[str]) -> None:
    name, value = override.name, show(override.value)
    if name == "recipe" and value.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"+recipe={value}: a recipe file is given without +recipe=: {value} [RL1008]"
        )
    if value not in options:
        raise ConfigError(
            f"{name}={value}: there is no such {name}. {nearest(value, options)} [RL1007]"
        )
    if name == "recipe" and override.sign != "+":
        raise ConfigError(
            f"recipe={value}: a recipe is added with a plus: +recipe={value} [RL1008]"
        )
    if name != "recipe" and override.sign:
        raise ConfigError(
            f"+{name}={value}: {name} always has a choice: write {name}={value} [RL1008]"
        )


def check_key(override: Override, groups: Groups) -> None:
    name = override.name
    known = {key.name: key for key in keys()}
    if any(key.free and name.startswith(f"{key.name}.") for key in known.values()):
        return
    if name not in known and name not in set(sections()):
        raise ConfigError(unknown_key(name, groups))
    if override.sign == "+":
        raise ConfigError(f"+{name}: the key exists already: write it without the plus [RL1008]")
