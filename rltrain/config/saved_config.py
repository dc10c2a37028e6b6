"""The configuration of a run, saved in its folder."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rltrain.config.bounded_files import check_yaml
from rltrain.config.differences import differences
from rltrain.config.durable import write_durably
from rltrain.config.errors import validate
from rltrain.config.redact import Redactor, redacted
from rltrain.config.root import Config

NAME = "config.yaml"
RECIPE = "recipe.json"
REMOVED_KEYS: dict[tuple[str, str], object] = {
    ("model", "bridge"): False,
    ("rollout", "top_p"): 1.0,
    ("rollout", "top_k"): 0,
}
"""Runs saved these keys, by section and name. With this value a key changed nothing, so it is left
out when a run is read. Any other value is refused."""
RENAMED_VALUES: dict[tuple[str, str, object], dict[str, object]] = {
    ("tracking", "wandb", "disabled"): {"backends": []},
}
"""By section, key and value as runs saved them: the keys of that section that say it now."""


def save_config(config: Config, program: str, arguments: Sequence[str]) -> Path:
    """Write the resolved configuration into the run's folder, below the command that made it.

    What looks like a secret is redacted in both.
    """
    path = Path(config.trainer.output_dir) / NAME
    command = f"{program} {shlex.join(Redactor().arguments(arguments))}"
    text = yaml.safe_dump(redacted(config.model_dump(mode="json")), sort_keys=False)
    write_durably(path, f"# {command}\n{text}")
    return path


def save_recipe(config: Config, name: str, recipe: Config) -> Path:
    """Write into the run's folder which keys the run changed of its recipe, secrets redacted."""
    path = Path(config.trainer.output_dir) / RECIPE
    dumps = [redacted(one.model_dump(mode="json")) for one in (recipe, config)]
    changes = {
        key: {"recipe": theirs, "run": ours}
        for key, (theirs, ours) in differences(dumps).items()
        if key != "trainer.output_dir"
    }
    text = json.dumps(redacted({"name": name, "changes": changes}), indent=2)
    write_durably(path, f"{text}\n")
    return path


def load_config(run: Path) -> Config:
    """The configuration of the run in folder ``run``.

    Raises:
        ValueError: the folder holds no run, or one that this version cannot read.
    """
    path = run / NAME
    if not path.is_file():
        raise ValueError(f"{run}: expected the folder of a run, found no {NAME} in it [RL7001]")
    check_yaml(path)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    for (section, key), value in REMOVED_KEYS.items():
        _take_out(values, section, key, value)
    for (section, key, value), now in RENAMED_VALUES.items():
        if _take_out(values, section, key, value):
            values[section] |= now
    return validate(values)


def _take_out(values: Any, section: str, key: str, value: object) -> bool:
    """Take the key out of saved values if it has this value. False if it has not."""
    keys = values.get(section) if isinstance(values, dict) else None
    if not isinstance(keys, dict) or key not in keys or keys[key] != value:
        return False
    del keys[key]
    return True
