"""A Hugging Face folder becomes a checkpoint of Megatron's: one process, a file at a time.

OUT/
    policy/         Megatron's distributed checkpoint: the weights, in the dtype of the source
    huggingface/    configuration and tokenizer of the source
    manifest.json   size and SHA-256 of every other file
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.folder_config import copy_config
from rltrain.weights.huggingface.load import Checkpoint, open_checkpoint
from rltrain.weights.huggingface.manifest import write_manifest
from rltrain.weights.huggingface.new_folder import new_folder
from rltrain.weights.huggingface.stored_model import (
    HUGGINGFACE,
    POLICY,
    Chunk,
    ConversionProgress,
    StoredModel,
    owned_parameters,
)
from rltrain.weights.huggingface.torch_dist import TorchDistReader, write_torch_dist
from rltrain.weights.mapping.assembly import to_megatron
from rltrain.weights.mapping.grid import AxisPosition

GIB = 2**30


def import_huggingface(
    source: Path,
    out: Path,
    arch: Architecture,
    stored: StoredModel,
    progress: ConversionProgress,
    max_file_bytes: int = GIB,
) -> None:
    """Write the weights of the Hugging Face folder ``source`` as the new checkpoint ``out``.

    Raises:
        ValueError: ``source`` is not of ``arch``, or it changed; or see `new_folder`
        OSError: the disk is full, say
    """
    checkpoint = open_checkpoint(source, arch)
    before = _files(source, checkpoint)
    with new_folder(out) as folder:
        (folder / POLICY).mkdir()
        (folder / HUGGINGFACE).mkdir()
        tensors = _tensors(checkpoint, arch, stored, progress)
        write_torch_dist(folder / POLICY, tensors, stored, max_file_bytes)
        dtype = TorchDistReader(folder / POLICY).dtype(
            stored.chunks[owned_parameters(arch)[0].name][0]
        )
        copy_config(source, folder / HUGGINGFACE, arch, dtype)
        if _files(source, checkpoint) != before:
            raise ValueError(f"{source} changed while it was read; import it again [RL3003]")
        write_manifest(folder)


def _files(source: Path, checkpoint: Checkpoint) -> dict[Path, Any]:
    """Changes when the folder does, as far as can be told without reading all of it."""
    files = {source / "config.json", *(tensor.file for tensor in checkpoint.tensors.values())}
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def _tensors(
    checkpoint: Checkpoint, arch: Architecture, stored: StoredModel, progress: ConversionProgress
) -> Iterator[tuple[Chunk, Tensor]]:
    for parameter in owned_parameters(arch):
        whole = to_megatron(parameter, checkpoint.read, arch, AxisPosition())
        chunks = stored.chunks[parameter.name]
        for chunk, rows in zip(chunks, whole.chunk(len(chunks)), strict=True):
            yield chunk, rows.clone() if len(chunks) > 1 else rows  # a view keeps all rows alive
        progress.advance(whole.numel(), whole.nbytes)
