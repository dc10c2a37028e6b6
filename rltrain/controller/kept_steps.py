"""Batches of steps whose numbers were not finite, kept to be run again alone.

    <run>/steps/step-000012/
        batch.safetensors  every field of the batch that was there, with its routes
        step.json          which step it was, what was found, and what it takes to run it again

The last few are kept. They are written beside the older one of that step and renamed.
"""

import json
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config.bounded_files import load_json
from rltrain.config.durable import rename_durably, sync_all
from rltrain.policy.passes.fetch_routes import fetch_routes

FOLDER = "steps"
BATCH, ABOUT = "batch.safetensors", "step.json"
KEPT = 3


@dataclass(frozen=True)
class KeptStep:
    """What is said of a kept batch."""

    step: int
    causes: list[str]
    kl_coef: float
    """Of the KL in the loss, in that step."""
    saved: int
    """The step of the newest checkpoint then; 0 without one."""
    route_layers: list[int]
    """Of the routes, the layers that have a router; none without routes."""


def keep(run_dir: Path, about: KeptStep, batch: Batch) -> Path:
    """Write a batch; of older ones, the newest stay.

    Raises:
        OSError: the disk is full or cannot be written.
        RuntimeError: the routes are lost.
    """
    batch, layers = _with_own_routes(batch)
    about = KeptStep(**{**asdict(about), "route_layers": list(layers)})
    folder = run_dir / FOLDER / f"step-{about.step:06d}"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    present = {name: value.contiguous() for name, value in tensors.items() if value is not None}
    try:
        save_file(present, partial / BATCH)
        (partial / ABOUT).write_text(json.dumps(asdict(about), indent=1))
        sync_all(partial)
        shutil.rmtree(folder, ignore_errors=True)
        rename_durably(partial, folder)
    except SafetensorError as error:  # as which it tells a full disk
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in sorted(folder.parent.glob("step-*"))[:-KEPT]:
        if old != folder:
            shutil.rmtree(old)
    return folder


def read(named: Path) -> tuple[KeptStep, Batch, Path]:
    """What `keep` wrote, and the folder of its run.

    Args:
        named: the folder of the step, or a file in it

    Raises:
        ValueError: it is none, or was changed.
    """
    folder = (named.parent if named.is_file() else named).expanduser().absolute()
    try:
        about = KeptStep(**load_json(folder / ABOUT))
        batch = Batch(**load_file(folder / BATCH))
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{named}: expected a step that a run has kept, such as RUN/{FOLDER}/step-000012 with "
            f"{BATCH} and {ABOUT}, found none that can be read ({error}) [RL7004]"
        ) from error
    return about, batch, folder.parents[1]


def _with_own_routes(batch: Batch) -> tuple[Batch, tuple[int, ...]]:
    """The batch with its routes as a tensor in the place of references, and their layers."""
    refs: Any = batch.rollout_expert_indices
    if not isinstance(refs, tuple):
        return batch, ()
    if not refs:
        return batch.with_fields(rollout_expert_indices=None), ()
    layers = refs[0][0].layers
    routes: Tensor = torch.from_numpy(fetch_routes(refs, layers))
    return batch.with_fields(rollout_expert_indices=routes), layers
