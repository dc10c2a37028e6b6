"""What the shell completes of overrides: recipes, options of groups, and keys with their values.

Nothing here imports torch, Ray, vLLM, Transformers or Hydra: a person waits for it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rltrain.config.hydra_groups import Groups

Completions = list[tuple[str, str]]
"""What may stand there, each with its description."""


def complete_override(context: typer.Context, incomplete: str) -> Completions:
    """What the override that begins with ``incomplete`` may be.

    Bash splits words at ``=`` and asks for what follows it. zsh and fish ask for the whole word.
    """
    from rltrain.config.hydra_groups import find_groups

    config_dir: Path | None = context.params.get("config_dir")
    groups = find_groups(config_dir if config_dir and config_dir.is_dir() else None)
    names = _names(groups)
    name = _split_name(context.params.get("overrides") or [])
    if f"{name}=" in dict(names):
        return _values(name, groups)
    if "=" in incomplete:
        name = incomplete.partition("=")[0]
        return [(f"{name}={value}", about) for value, about in _values(name, groups)]
    begun = [(name, about) for name, about in names if name.startswith(incomplete)]
    if len(begun) == 1:  # two choices with a common beginning: the shell appends no space
        name = begun[0][0]
        return begun + [(f"{name}{value}", about) for value, about in _values(name[:-1], groups)]
    return begun


def _split_name(overrides: list[str]) -> str:
    """The name before the ``=`` at which Bash has split the word; empty where it has not."""
    words = overrides[:-1] if overrides[-1:] == ["="] else overrides
    return words[-1] if words and "=" not in words[-1] else ""


def _names(groups: "Groups") -> Completions:
    from rltrain.config.reference import keys

    chosen = [(f"{'+' * (group == 'recipe')}{group}=", "") for group in groups]
    return chosen + [(f"{key.name}=", _first_sentence(key.doc)) for key in keys()]


def _values(name: str, groups: "Groups") -> Completions:
    """Options of a group, choices of a key, or its default."""
    from rltrain.config.hydra_groups import summary
    from rltrain.config.reference import keys, show

    options = groups.get(name.lstrip("+"), {})
    if options:
        return [(option, summary(file)) for option, file in sorted(options.items())]
    key = next((key for key in keys() if key.name == name.lstrip("+")), None)
    if key is None or key.free:
        return []
    if key.choices:
        return [(show(choice), "") for choice in key.choices]
    return [(show(key.default), f"the default; {key.type}")]


def _first_sentence(doc: str) -> str:
    return " ".join(doc.replace("``", "").split()).partition(". ")[0]
