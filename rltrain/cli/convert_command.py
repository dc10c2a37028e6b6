"""``rltrain import`` and ``rltrain export``: Hugging Face folders and checkpoints of Megatron's.

No Ray, no GPU and none of a run's layout: one process, which holds one file at a time. Functions
import what loads torch, after the arguments were checked.
"""

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rltrain.tracking.progress import TransferBar
    from rltrain.weights.architecture.decoder import Architecture
    from rltrain.weights.huggingface.stored_model import StoredModel
    from rltrain.weights.mapping.mtp import MTP

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def import_weights(source: Path, out: Path, *, max_file: str) -> int:
    """Write a Hugging Face folder as a checkpoint of Megatron's.

    Args:
        max_file: what a file and the memory hold at most, such as 1GiB

    Raises:
        ValueError: FOLDER is no supported model, or OUT exists.
        RuntimeError: OUT cannot be written, for example on a full disk.
    """
    source, out, limit = _absolute(source), _absolute(out), _bytes(max_file)
    if not source.is_dir():  # said before torch is imported, which takes seconds
        raise ValueError(
            f"{source}: expected a Hugging Face folder, found "
            f"{'a file' if source.exists() else 'no such folder'}"
            " [RL3001]"
        )
    from rltrain.weights.families import read_architecture
    from rltrain.weights.huggingface.import_checkpoint import import_huggingface
    from rltrain.weights.huggingface.load import open_checkpoint

    arch = read_architecture(source)
    open_checkpoint(source, arch)  # a broken folder ends here, before Megatron is loaded
    work = partial(import_huggingface, source, out, arch)
    _convert("import", arch, out, limit, work)
    sys.stdout.write(f"{out}\n")
    return 0


def export_weights(
    source: str, out: str, *, step: int | None, dtype: str | None, max_file: str, trust: bool
) -> int:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        source: a folder, or a URL
        out: a folder, or a URL
        step: of the run's checkpoint; the newest where it is None
        dtype: of the weights; as they are stored where it is None
        max_file: what a file and the memory hold at most, such as 1GiB
        trust: open what could run code, and fetch from whatever URL the checkpoint names

    Raises:
        ValueError: there is no such checkpoint, it was changed, parts of it are on other nodes, it
            is not trusted, or OUT exists.
        RuntimeError: OUT cannot be written, for example on a full disk.
    """
    limit = _bytes(max_file)
    from rltrain.cli.export_places import is_url, readable_run, with_weights, writable

    with readable_run(source) as run, writable(out) as folder:
        checkpoint, config, mtp = _find_checkpoint(run, step)
        with with_weights(checkpoint, source, trust=trust) as weights:
            _export(weights, config, folder, mtp, dtype, limit, trust=trust)
    sys.stdout.write(f"{out if is_url(out) else folder}\n")
    return 0


def _export(
    checkpoint: Path,
    config: Path,
    out: Path,
    mtp: "MTP",
    dtype: str | None,
    limit: int,
    *,
    trust: bool,
) -> None:
    import torch

    from rltrain.weights.families import read_architecture
    from rltrain.weights.huggingface.export import export_checkpoint

    arch = read_architecture(config, mtp)
    stored_as = getattr(torch, dtype) if dtype else None
    work = partial(export_checkpoint, checkpoint, config, out, arch, dtype=stored_as, trust=trust)
    _convert("export", arch, out, limit, work)


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(KiB|MiB|GiB|)", text)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"--max-file: expected a size like 512MiB or 1GiB, found {text} [RL6008]")
    return int(match[1]) * _UNITS[match[2]]


def _find_checkpoint(source: Path, step: int | None) -> tuple[Path, Path, "MTP"]:
    """The checkpoint, the folder with its configuration and tokenizer, and whether
    it has layers that predict further tokens."""
    if not source.is_dir():  # said before torch is imported, which takes seconds
        raise ValueError(
            f"{source}: expected a run's folder, a checkpoint in it or an imported one, found "
            f"{'a file' if source.exists() else 'no such folder'}"
            " [RL6008]"
        )
    from rltrain.config.saved_config import NAME, load_config
    from rltrain.controller.run_checkpoint import (
        FOLDER,
        checkpoints,
        last_weights,
        read_state,
        step_of,
    )
    from rltrain.data.tiny_model import build_random_model
    from rltrain.weights.huggingface.stored_model import HUGGINGFACE

    if (source / HUGGINGFACE).is_dir() and not (source / NAME).exists():
        if step is not None:
            raise ValueError(
                f"--step {step}: {source} is an imported checkpoint and has no steps [RL6008]"
            )
        return source, source / HUGGINGFACE, "hold"
    run, named = (source.parent.parent, source) if source.parent.name == FOLDER else (source, None)
    config = load_config(run)
    checkpoint_of = (
        {} if (last := last_weights(run)) is None else {int(read_state(last)["step"]): last}
    )
    checkpoint_of |= {step_of(path): path for path in checkpoints(run)}
    if named is not None:
        if named not in (*checkpoint_of.values(), last):
            raise ValueError(f"{named}: expected a checkpoint, found none that is whole [RL6008]")
        if step is not None:
            raise ValueError(
                f"--step {step}: {named} is one checkpoint already; drop --step [RL6008]"
            )
        checkpoint_of = {int(read_state(named)["step"]): named}
    if not checkpoint_of:
        raise ValueError(
            f"{run}: expected a checkpoint to export, found none. A run that was ended before its "
            "last step has those of checkpoint.every=N alone, and checkpoint.last=false keeps no "
            "final weights"
            " [RL6008]"
        )
    if step is not None and step not in checkpoint_of:
        raise ValueError(
            f"--step {step}: {run} has the weights of steps {sorted(checkpoint_of)} [RL6008]"
        )
    # What the run started from has the architecture and the tokenizer; the tiny model's are those
    # of its random weights.
    origin = config.model.path or build_random_model(config.model)
    step = max(checkpoint_of) if step is None else step
    return checkpoint_of[step], Path(origin).expanduser(), config.model.mtp


def _convert(
    command: str,
    arch: "Architecture",
    out: Path,
    max_file: int,
    work: Callable[["StoredModel", "TransferBar", int], None],
) -> None:
    if out.exists():
        raise ValueError(f"{out} exists already: choose another folder to write to [RL6009]")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron would start up a GPU that nothing here uses
    from rltrain.policy.megatron.checkpoint_probe import stored_model
    from rltrain.tracking.progress import TransferBar
    from rltrain.weights.huggingface.stored_model import owned_parameters, parameter_numel

    stored = stored_model(arch)
    try:
        with TransferBar(command, sum(map(parameter_numel, owned_parameters(arch)))) as bar:
            work(stored, bar, max_file)
    except OSError as error:
        raise RuntimeError(
            f"{out} not written: {error}. Nothing of it is left; free some space and run "
            "the same command again"
            " [RL6005]"
        ) from error
