"""Checkpoints of a run: which there are, and of which model.

    <run>/checkpoints/step_000010/
        policy/        Megatron's distributed checkpoint
        critic/        likewise, where there is one
        reference/     parameters alone, where the reference is refreshed
        state.json     step, data position, which model it is of
        manifest.json  size and SHA-256 of every other file
    <run>/checkpoints/last/
        policy/        the final weights alone; or all of it is a link to the last step's checkpoint

They are written by `save_checkpoint` and opened by `restore_checkpoint`; `checkpoint_storage` says
where their files are. Here a checkpoint is its record: the manifest and `state.json`.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.config import Config
from rltrain.config.bounded_files import MOST_OF_TABLES, load_json
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
)

if TYPE_CHECKING:
    from rltrain.weights.architecture.decoder import Architecture
    from rltrain.weights.huggingface.identity import ModelIdentity

logger = logging.getLogger(__name__)

STATE = "state.json"
FOLDER = "checkpoints"
LAST = "last"
"""The folder of the final weights."""


def checkpoints(run_dir: Path) -> list[Path]:
    """The complete ones of its steps, oldest first."""
    complete = (p.parent for p in _folder(run_dir).glob(f"step_*/{MANIFEST}"))
    return sorted(complete, key=step_of)


def last_weights(run_dir: Path) -> Path | None:
    """Where `save_last` left weights; None where it has not."""
    last = _folder(run_dir) / LAST
    return last if (last / MANIFEST).is_file() else None


def model_of(config: Config, arch: "Architecture") -> "ModelIdentity":
    """What a checkpoint of this run says of its model.

    Args:
        arch: see `model_checks.read_model`
    """
    # Importing it imports torch, which takes seconds.
    from rltrain.weights.huggingface.identity import identity_of, identity_of_recipe

    model = config.model
    if model.path is None:
        return identity_of_recipe(arch, model.tiny.model_dump(mode="json"))
    imported = None if model.weights is None else Path(model.weights).expanduser()
    return identity_of(Path(model.path).expanduser(), arch, imported)


def check_model(path: Path, model: "ModelIdentity", *, trust: bool) -> None:
    """The checkpoint in ``path`` is of this model.

    Raises:
        ValueError: it is of another one, or does not say and is not trusted.
    """
    # It loads torch, which the preflight of a fresh run does not need.
    from rltrain.weights.huggingface.identity import identity_differences

    saved = read_state(path).get("model")
    if saved is None and not trust:
        raise ValueError(
            f"{path} does not say which model it is of: a version of rltrain before 0.1.1 wrote "
            "it. Set checkpoint.trust=true if you know that it is of this model"
            " [RL6007]"
        )
    if saved is not None and (differences := identity_differences(saved, model)):
        raise ValueError(
            f"{path} is of another model than model.path:\n"
            + "\n".join(f"  {line}" for line in differences)
            + "\nGo on with the model that the run began with, or start anew in another "
            "trainer.output_dir [RL6003]"
        )


def check_resumed(config: Config, arch: "Architecture") -> None:
    """What ``trainer.resume=auto`` would go on from is of this run's model; see `check_model`."""
    saved = checkpoints(Path(config.trainer.output_dir))
    if config.trainer.resume == "auto" and saved:
        check_model(saved[-1], model_of(config, arch), trust=config.checkpoint.trust)


def read_state(path: Path) -> dict[str, Any]:
    """What was saved beside the models.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        state: dict[str, Any] = load_json(path / STATE, MOST_OF_TABLES)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path / STATE} cannot be read ({error}). Remove {path} to go on from an older "
            "checkpoint"
            " [RL6004]"
        ) from error
    return state


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written, by its name."""
    return int(path.name.removeprefix("step_"))


def _folder(run_dir: Path) -> Path:
    return run_dir / FOLDER
