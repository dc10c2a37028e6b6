"""Checkpoints of a run: written beside the old one, proven by a manifest, swapped in by rename.

    <run>/checkpoints/step_000010/
        policy/        Megatron's distributed checkpoint
        critic/        likewise, where there is one
        reference/     parameters alone, where the reference is refreshed
        state.json     step, data position, which model it is of
        manifest.json  size and SHA-256 of every other file
    <run>/checkpoints/last/
        policy/        the final weights alone; or all of it is a link to the last step's checkpoint

Megatron's format holds pickles, which run code when opened. So a checkpoint is opened only if every
file is what its manifest says and it lies in this run's own folder, or ``checkpoint.trust`` is set.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.config import Config
from rltrain.config.trainer import CheckpointConfig
from rltrain.planning.memory_terms import gib
from rltrain.weights.huggingface.manifest import (
    MANIFEST,
    check_manifest,
    entries_of,
    write_manifest,
)

if TYPE_CHECKING:
    from rltrain.controller.cluster.policy_group import PolicyGroup
    from rltrain.controller.cluster.worker_group import WorkerGroup, Written
    from rltrain.weights.architecture.decoder import Architecture
    from rltrain.weights.huggingface.identity import ModelIdentity

logger = logging.getLogger(__name__)

STATE = "state.json"
FOLDER = "checkpoints"
LAST = "last"
"""The folder of the final weights."""


def save(
    run_dir: Path,
    step: int,
    groups: Sequence["WorkerGroup[Any]"],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of ``step``; older ones than the ``keep`` newest go, after it is there.

    Args:
        groups: each fills its ``folders``
        state: with the `model_of` the run

    Raises:
        RuntimeError: the disk is full or cannot be written; the older checkpoints are untouched.
    """

    def write(checkpoint: Path) -> list["Written"]:
        return [written for group in groups for written in group.save(checkpoint)]

    target = _write(_folder(run_dir) / f"step_{step:06d}", {"step": step, **state}, write)
    for old in checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return target


def save_last(run_dir: Path, step: int, policy: "PolicyGroup", model: "ModelIdentity") -> Path:
    """Leave the weights after ``step``, the run's last, in ``checkpoints/last``.

    Where the checkpoint of that step is there, a link to it; else the policy's parameters alone,
    which can be exported and not resumed.

    Raises:
        RuntimeError: as `save`.
    """
    last, whole = _folder(run_dir) / LAST, _folder(run_dir) / f"step_{step:06d}"
    if whole in checkpoints(run_dir):
        link = last.with_name(f".{LAST}.partial")
        _remove(link)
        link.symlink_to(whole.name)
        _remove(last)
        os.rename(link, last)
        return last
    return _write(
        last,
        {"step": step, "model": model},
        policy.save_weights,
    )


def _write(
    target: Path, state: Mapping[str, Any], write: Callable[[Path], Sequence["Written"]]
) -> Path:
    """Fill a folder beside ``target`` and swap it in.

    Args:
        write: fills that folder, which is empty, and says what each rank wrote there
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        for left in target.parent.glob(".*.partial"):  # by a process that was killed
            _remove(left)
        partial.mkdir(parents=True)
        entries = {name: entry for files in write(partial) for name, entry in files.items()}
        (partial / STATE).write_text(json.dumps(dict(state)))
        write_manifest(partial, entries | entries_of(partial, [STATE]))
        _remove(target)
        os.rename(partial, target)
    except (OSError, RuntimeError) as error:  # a worker's error is an `ActorFailed`
        _remove(partial)
        raise RuntimeError(
            f"checkpoint of step {state['step']} not written to {target}: {error}\n"
            f"{_free(target)} Older checkpoints are untouched; go on from the newest with "
            "trainer.resume=auto"
            " [RL6005]"
        ) from error
    return target


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)  # what then stands in the way, the rename names


def _free(target: Path) -> str:
    folder = next(parent for parent in target.parents if parent.exists())
    return f"The disk of {folder} has {gib(shutil.disk_usage(folder).free)} free."


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
        state: dict[str, Any] = json.loads((path / STATE).read_text())
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


def restore(
    path: Path, run_dir: Path, groups: Sequence["WorkerGroup[Any]"], config: CheckpointConfig
) -> dict[str, Any]:
    """Load a checkpoint into the groups; returns the state that was saved with it.

    Raises:
        ValueError: it is not from this run and not trusted, a file is not what it was, or it was
            saved without a folder of a group.
    """
    verify(path, run_dir, trust=config.trust)
    for folder in (folder for group in groups for folder in group.folders):
        if not (path / folder).is_dir():
            raise ValueError(
                f"{path} was saved by a run without a {folder}: go on with the configuration "
                "of that run, or start anew in another trainer.output_dir"
                " [RL6006]"
            )
    for group in groups:
        group.load(path)
    state = read_state(path)
    logger.info("resumed after step %d from %s", state["step"], path)
    return state


def verify(path: Path, run_dir: Path, *, trust: bool) -> None:
    """Raise ValueError unless ``path`` may be opened."""
    if not trust and _folder(run_dir).resolve() not in path.resolve().parents:
        raise ValueError(
            f"{path} is not from this run's folder {run_dir}. A checkpoint holds pickles, which "
            "can run any code: set checkpoint.trust=true only if you know who wrote it"
            " [RL6007]"
        )
    check_manifest(path)


def _folder(run_dir: Path) -> Path:
    return run_dir / FOLDER
