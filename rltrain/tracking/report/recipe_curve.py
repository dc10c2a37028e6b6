"""What a run changed of its recipe, and the accuracy that the recipe's authors measured."""

import csv
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.config.hydra_groups import find_recipes
from rltrain.tracking.report.run_folder import RunFolder
from rltrain.tracking.report.series import Series

INCOMPARABLE = ("model.", "data.", "algorithm.type")
"""With another model, task or kind of run the recipe's curve says nothing about this one."""
NO_EFFECT = (
    *("trainer.output_dir", "tracking.", "cluster.", "checkpoint.", "policy.threads"),
    *("data.reward.num_workers", "data.reward.timeout_s"),
)
"""Differences that change no number of the curve; the page does not warn about them."""


@dataclass(frozen=True)
class RecipeOfRun:
    """``changes`` are (key, recipe's value, run's value), or None for a run that did not save them.

    ``overrides`` are those of the command line.
    """

    name: str
    changes: list[tuple[str, str, str]] | None
    overrides: list[str]

    @property
    def changed_keys(self) -> list[str]:
        if self.changes is not None:
            return [key for key, _, _ in self.changes]
        return [text.partition("=")[0].lstrip("+~") for text in self.overrides]


def recipe_of(run: RunFolder) -> RecipeOfRun | None:
    """The recipe that the run's command line named; None where it named none."""
    try:
        words = shlex.split(run.command)
    except ValueError:  # a hand-edited comment is not a command
        return None
    names = [word.partition("=")[2] for word in words if word.startswith("+recipe=")]
    if "name" in run.recipe:
        names.append(str(run.recipe["name"]))
    if not names:
        return None
    overrides = [w for w in words if "=" in w and not w.startswith(("+recipe=", "-"))]
    changes = run.recipe.get("changes")
    shown = None
    if isinstance(changes, Mapping):
        shown = [
            (str(key), _text(pair.get("recipe")), _text(pair.get("run")))
            for key, pair in changes.items()
        ]
    return RecipeOfRun(names[-1], shown, overrides)


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def expected_curve(recipe: RecipeOfRun) -> tuple[dict[str, Series], str]:
    """The recipe's evaluation accuracy by seed, as shares, and a sentence about it.

    No curve is given where the run differs from the recipe in what the curve depends on.
    """
    file = find_recipes().get(recipe.name)
    curve = file.with_name("curve.csv") if file else None
    if curve is None or not curve.is_file():
        return {}, ""
    changed = [key for key in recipe.changed_keys if not _matches(key, NO_EFFECT)]
    other = [key for key in changed if _matches(key, INCOMPARABLE)]
    if other:
        return {}, (
            f"The expected curve of {recipe.name} is not drawn: this run has another "
            f"{', '.join(other)}."
        )
    seeds = _read_curve(curve)
    if not seeds:
        return {}, ""
    said = f"Dashed: {recipe.name} as measured by its authors, {len(seeds)} seeds."
    if changed:
        said += f" This run overrides {', '.join(changed)}."
    return seeds, said


def _matches(key: str, prefixes: tuple[str, ...]) -> bool:
    """A group override such as ``data=jsonl`` changes the section it names."""
    return any(key == prefix.rstrip(".") or key.startswith(prefix) for prefix in prefixes)


def _read_curve(path: Path) -> dict[str, Series]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    seeds = [name for name in (rows[0] if rows else {}) if name.startswith("seed_")]
    return {
        f"expected {name}": Series(
            [float(row["step"]) for row in rows], [float(row[name]) / 100 for row in rows]
        )
        for name in seeds
    }
