"""``rltrain import`` and ``rltrain export``: Hugging Face folders and checkpoints of Megatron's.

No Ray, no GPU and none of a run's layout: one process, which holds one file at a time. Functions
import what loads torch, after the arguments were checked.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rltrain.tracking.progress import TransferBar
    from rltrain.weights.architecture.decoder import Architecture
    from rltrain.weights.huggingface.stored_model import StoredModel
    from rltrain.weights.mapping.mtp import MTP

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def import_command(arguments: Sequence[str]) -> int:
    """Write a Hugging Face folder as a checkpoint of Megatron's.

    Raises:
        ValueError: FOLDER is no supported model, or OUT exists.
        RuntimeError: OUT cannot be written, for example on a full disk.
    """
    parser = _parser("import", "FOLDER", "a Hugging Face folder")
    options = parser.parse_args(arguments)
    from rltrain.weights.families import read_architecture
    from rltrain.weights.huggingface.import_checkpoint import import_huggingface
    from rltrain.weights.huggingface.load import open_checkpoint

    arch = read_architecture(options.source)
    open_checkpoint(options.source, arch)  # a broken folder ends here, before Megatron is loaded
    work = partial(import_huggingface, options.source, options.out, arch)
    return _convert("import", arch, options, work)


def export_command(arguments: Sequence[str]) -> int:
    """Write a checkpoint as a Hugging Face folder.

    Raises:
        ValueError: there is no such checkpoint, it was changed, or OUT exists.
        RuntimeError: OUT cannot be written, for example on a full disk.
    """
    parser = _parser(
        "export", "SOURCE", "a run's folder, a checkpoint in it, or what rltrain import wrote"
    )
    parser.add_argument("--step", type=int, help="of the run's checkpoint; the newest otherwise")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; as they are stored otherwise",
    )
    options = parser.parse_args(arguments)
    checkpoint, config, mtp = _find_checkpoint(options.source, options.step)
    import torch

    from rltrain.weights.families import read_architecture
    from rltrain.weights.huggingface.export import export_checkpoint
    from rltrain.weights.huggingface.manifest import check_manifest

    arch = read_architecture(config, mtp)
    check_manifest(checkpoint)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    work = partial(export_checkpoint, checkpoint, config, options.out, arch, dtype=dtype)
    return _convert("export", arch, options, work)


def _parser(command: str, source: str, source_help: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"rltrain {command}")
    parser.add_argument("source", metavar=source, type=_path, help=source_help)
    parser.add_argument("out", metavar="OUT", type=_path, help="a folder that does not exist")
    parser.add_argument(
        "--max-file",
        metavar="SIZE",
        type=_size,
        default="1GiB",
        help="what a file and the memory hold at most; like 512MiB (1GiB)",
    )
    return parser


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(KiB|MiB|GiB|)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size like 512MiB or 1GiB, found {text}")
    return int(match[1]) * _UNITS[match[2]]


def _find_checkpoint(source: Path, step: int | None) -> tuple[Path, Path, "MTP"]:
    """The checkpoint, the folder with its configuration and tokenizer, and whether
    it has layers that predict further tokens."""
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
            raise ValueError(f"--step {step}: {source} is an imported checkpoint and has no steps")
        return source, source / HUGGINGFACE, "hold"
    run, named = (source.parent.parent, source) if source.parent.name == FOLDER else (source, None)
    config = load_config(run)
    checkpoint_of = (
        {} if (last := last_weights(run)) is None else {int(read_state(last)["step"]): last}
    )
    checkpoint_of |= {step_of(path): path for path in checkpoints(run)}
    if named is not None:
        if named not in (*checkpoint_of.values(), last):
            raise ValueError(f"{named}: expected a checkpoint, found none that is whole")
        if step is not None:
            raise ValueError(f"--step {step}: {named} is one checkpoint already; drop --step")
        checkpoint_of = {int(read_state(named)["step"]): named}
    if not checkpoint_of:
        raise ValueError(
            f"{run}: expected a checkpoint to export, found none. A run that was ended before its "
            "last step has those of checkpoint.every=N alone, and checkpoint.last=false keeps no "
            "final weights"
        )
    if step is not None and step not in checkpoint_of:
        raise ValueError(f"--step {step}: {run} has the weights of steps {sorted(checkpoint_of)}")
    # What the run started from has the architecture and the tokenizer; the tiny model's are those
    # of its random weights.
    origin = config.model.path or build_random_model(config.model)
    step = max(checkpoint_of) if step is None else step
    return checkpoint_of[step], Path(origin).expanduser(), config.model.mtp


def _convert(
    command: str,
    arch: "Architecture",
    options: argparse.Namespace,
    work: Callable[["StoredModel", "TransferBar", int], None],
) -> int:
    if options.out.exists():
        raise ValueError(f"{options.out} exists already: choose another folder to write to")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron would start up a GPU that nothing here uses
    from rltrain.policy.megatron.checkpoint_probe import stored_model
    from rltrain.tracking.progress import TransferBar
    from rltrain.weights.huggingface.stored_model import owned_parameters, parameter_numel

    stored = stored_model(arch)
    try:
        with TransferBar(command, sum(map(parameter_numel, owned_parameters(arch)))) as bar:
            work(stored, bar, options.max_file)
    except OSError as error:
        raise RuntimeError(
            f"{options.out} not written: {error}. Nothing of it is left; free some space and run "
            "the same command again"
        ) from error
    sys.stdout.write(f"{options.out}\n")
    return 0
