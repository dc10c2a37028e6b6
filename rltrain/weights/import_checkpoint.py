"""A Hugging Face folder becomes a checkpoint of Megatron's: one process, a parameter at a time.

    OUT/
        policy/         Megatron's distributed checkpoint: the weights, in the dtype of the source
        huggingface/    configuration and tokenizer of the source
        manifest.json   size and SHA-256 of every other file

What was interrupted goes on after its last whole file (`rltrain.weights.journal`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltrain.weights.architecture import Architecture
from rltrain.weights.journal import Journal
from rltrain.weights.layout import Parameter
from rltrain.weights.load import Checkpoint, open_checkpoint
from rltrain.weights.manifest import entry_of
from rltrain.weights.mapping import assemble
from rltrain.weights.placement import Axis
from rltrain.weights.safetensors_file import copy_the_rest
from rltrain.weights.stored import HUGGINGFACE, POLICY, Progress, StoredModel, numel, owned
from rltrain.weights.torch_dist import SUFFIX, write_chunk, write_metadata, write_object

GIB = 2**30


def import_huggingface(
    source: Path,
    out: Path,
    arch: Architecture,
    stored: StoredModel,
    progress: Progress,
    max_file_bytes: int = GIB,
) -> None:
    """Write the weights of the Hugging Face folder ``source`` as the new checkpoint ``out``.

    Raises:
        ValueError: ``source`` is not of ``arch``, or it changed; or see `Journal`
        OSError: the disk is full. The same call goes on from there.
    """
    checkpoint = open_checkpoint(source, arch)
    identity = {"source": _identity(source, checkpoint), "max file": max_file_bytes}
    with Journal(out, identity) as journal:
        if not journal.parts:
            with journal.part(f"{POLICY}/__0_0{SUFFIX}") as part:
                for key in stored.objects:
                    write_object(part, key)
        num_chunks = sum(len(part["notes"]) for part in journal.parts[1:])
        left = (
            (parameter, assemble(parameter, checkpoint.read, arch, Axis()))
            for parameter in _after(owned(arch), stored, num_chunks, progress)
        )
        pending = next(left, None)
        while pending is not None:
            with journal.part(f"{POLICY}/__{len(journal.parts)}_0{SUFFIX}") as part:
                while pending is not None:
                    parameter, tensor = pending
                    if part.tell() and part.tell() + tensor.nbytes > max_file_bytes:
                        break
                    _write_chunks(part, stored, parameter, tensor)
                    progress.advance(tensor.numel(), tensor.nbytes)
                    pending = next(left, None)
        if _identity(source, checkpoint) != identity["source"]:
            raise ValueError(f"{source} changed while it was read; remove {journal.folder}")
        folder = journal.folder / POLICY
        notes = ((Path(part["name"]).name, part["notes"]) for part in journal.parts)
        write_metadata(folder, notes, stored.content)
        (journal.folder / HUGGINGFACE).mkdir(exist_ok=True)
        first = journal.parts[1]["notes"][0][-1]
        dtype = getattr(torch, first["dtype"])
        copy_the_rest(source, journal.folder / HUGGINGFACE, arch, dtype)
        journal.finish(with_manifest=True)


def _identity(source: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Changes when the folder does, as far as can be told without reading all of it."""
    files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    return {
        "config": entry_of(source / "config.json"),
        "files": {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
    }


def _after(
    every: Sequence[Parameter], stored: StoredModel, num_chunks: int, progress: Progress
) -> Iterator[Parameter]:
    """The parameters behind the first ``num_chunks`` chunks."""
    for parameter in every:
        if num_chunks > 0:
            num_chunks -= len(stored.chunks[parameter.name])
            progress.advance(numel(parameter), 0)
        else:
            yield parameter


def _write_chunks(part: Any, stored: StoredModel, parameter: Parameter, tensor: Tensor) -> None:
    chunks = stored.chunks[parameter.name]
    rows = tensor.shape[0] // len(chunks)
    for chunk, piece in zip(chunks, tensor.split(rows), strict=True):
        write_chunk(part, chunk, piece)
