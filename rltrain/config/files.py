"""The configuration of a run, saved beside what the run wrote."""

from pathlib import Path

import yaml

from rltrain.config.errors import validate
from rltrain.config.root import Config

NAME = "config.yaml"


def save(config: Config, command: str) -> Path:
    """Write the resolved configuration into the run's folder, below the command that made it."""
    path = Path(config.trainer.output_dir) / NAME
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    path.write_text(f"# {command}\n{text}", encoding="utf-8")
    return path


def load(run: Path) -> Config:
    """The configuration of the run in folder ``run``.

    Raises:
        ValueError: the folder holds no run, or one that this version cannot read.
    """
    path = run / NAME
    if not path.is_file():
        raise ValueError(f"{run}: expected the folder of a run, found no {NAME} in it")
    return validate(yaml.safe_load(path.read_text(encoding="utf-8")))
