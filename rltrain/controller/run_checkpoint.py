"""Checkpoints of a run: which there are, and of which model.

    <run>/checkpoints/step_000010/
        policy/        Megatron's distributed checkpoint
        critic/        likewise, where there is one
        reference/     parameters alone, where the reference is refreshed
        state.json     step, data position, which model it is of, with which configuration
        manifest.json  size and SHA-256 of every other file
    <run>/checkpoints/set_aside/step_000020/
        what a run did not go on from, though it is newer; nothing reads or removes it
    <run>/checkpoints/last/
        policy/        the final weights alone; or all of it is a link to the last step's checkpoint

They are written by `save_checkpoint`, chosen and proven whole by `find_checkpoint`, and opened by
`restore_checkpoint`; `checkpoint_storage` says where their files are. Here a checkpoint is its
record: the manifest and `state.json`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.actors import node_files
from rltrain.config import Config
from rltrain.config.bounded_files import MOST_OF_TABLES, load_json
from rltrain.weights.huggingface.manifest import MANIFEST

if TYPE_CHECKING:
    from rltrain.weights.architecture.decoder import Architecture
    from rltrain.weights.huggingface.identity import ModelIdentity

STATE = "state.json"
FOLDER = "checkpoints"
LAST = "last"
"""The folder of the final weights."""


def checkpoints(run_dir: Path) -> list[Path]:
    """Those of its steps that have a manifest, oldest first."""
    return [path for path in reversed(candidates_here(run_dir)) if (path / MANIFEST).is_file()]


def candidates_here(run_dir: Path) -> list[Path]:
    """The folders of its steps on this disk, newest first, whatever is in them."""
    return in_order(run_dir, node_files.step_folders(_folder(run_dir)))


def in_order(run_dir: Path, names: Iterable[str]) -> list[Path]:
    """The folders of these names, newest step first."""
    return sorted((_folder(run_dir) / name for name in set(names)), key=step_of, reverse=True)


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


def read_state(path: Path) -> dict[str, Any]:
    """What was saved beside the models.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        state = load_json(path / STATE, MOST_OF_TABLES)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path / STATE} cannot be read ({error}); use another checkpoint [RL6004]"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise ValueError(f"{path / STATE} does not say its step; use another checkpoint [RL6004]")
    return state


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written, by its name."""
    return int(path.name.removeprefix("step_"))


def _folder(run_dir: Path) -> Path:
    return run_dir / FOLDER
