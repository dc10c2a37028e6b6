"""Checkpoints of a run: written beside the old one, proven by a manifest, swapped in by rename.

    <run>/checkpoints/step_000010/
        policy/        Megatron's distributed checkpoint
        critic/        likewise, where there is one
        reference/     parameters alone, where the reference is refreshed
        state.json     step, data position
        manifest.json  size and SHA-256 of every other file

Megatron's format holds pickles, which run code when opened. So a checkpoint is opened only if every
file is what its manifest says and it lies in this run's own folder, or ``checkpoint.trust`` is set.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltrain.config.trainer import CheckpointConfig
from rltrain.controller.worker_group import WorkerGroup
from rltrain.weights import manifest

logger = logging.getLogger(__name__)

STATE = "state.json"


def save(
    run_dir: Path, step: int, groups: Sequence[WorkerGroup], state: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of ``step``; older ones than the ``keep`` newest go, after it is there.

    Args:
        groups: each writes the folders of its ``stored``

    Raises:
        RuntimeError: the disk is full or cannot be written; the older checkpoints are untouched.
    """
    target = _folder(run_dir) / f"step_{step:06d}"
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for group in groups:
            for folder, (method, _) in group.stored.items():
                (partial / folder).mkdir(parents=True)
                group.call(method, str(partial / folder))
        (partial / STATE).write_text(json.dumps({"step": step, **state}))
        manifest.write(partial)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(partial, target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RuntimeError(
            f"checkpoint of step {step} not written to {target}: {error}. Older checkpoints are "
            "untouched; free some space and resume with trainer.resume=auto"
        ) from error
    for old in checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(run_dir: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return sorted(p.parent for p in _folder(run_dir).glob(f"step_*/{manifest.MANIFEST}"))


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written, by its name."""
    return int(path.name.removeprefix("step_"))


def restore(
    path: Path, run_dir: Path, groups: Sequence[WorkerGroup], config: CheckpointConfig
) -> dict[str, Any]:
    """Load a checkpoint into the groups; returns the state that was saved with it.

    Raises:
        ValueError: it is not from this run and not trusted, a file is not what it was, or it was
            saved without what a group stores.
    """
    verify(path, run_dir, trust=config.trust)
    for folder in (folder for group in groups for folder in group.stored):
        if not (path / folder).is_dir():
            raise ValueError(
                f"{path} was saved by a run without a {folder}: go on with the configuration "
                "of that run, or start anew in another trainer.output_dir"
            )
    for group in groups:
        for folder, (_, method) in group.stored.items():
            group.call(method, str(path / folder))
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    logger.info("resumed after step %d from %s", state["step"], path)
    return state


def verify(path: Path, run_dir: Path, *, trust: bool) -> None:
    """Raise ValueError unless ``path`` may be opened."""
    if not trust and _folder(run_dir).resolve() not in path.resolve().parents:
        raise ValueError(
            f"{path} is not from this run's folder {run_dir}. A checkpoint holds pickles, which "
            "can run any code: set checkpoint.trust=true only if you know who wrote it"
        )
    manifest.check(path)


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"
