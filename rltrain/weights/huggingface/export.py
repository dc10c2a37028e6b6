"""Writes a Hugging Face folder for transformers and vLLM, from live ranks or a checkpoint."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.folder_config import copy_config
from rltrain.weights.huggingface.new_folder import new_folder, split_by_bytes
from rltrain.weights.huggingface.stored_model import (
    POLICY,
    ConversionProgress,
    StoredModel,
    owned_parameters,
    parameter_numel,
)
from rltrain.weights.huggingface.tensor_files import INDEX, SINGLE
from rltrain.weights.huggingface.torch_dist import TorchDistReader
from rltrain.weights.mapping.assembly import to_huggingface
from rltrain.weights.mapping.mtp import with_mtp_copies
from rltrain.weights.mapping.parameters import HfTensorSpec
from rltrain.weights.sync.engine_fp8 import quantize_stream
from rltrain.weights.sync.sender import join_stacked

GIB = 2**30


def write_huggingface(
    path: str | Path,
    source: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    arch: Architecture,
    dtype: torch.dtype,
    max_shard_bytes: int = GIB,
    *,
    fp8: bool = False,
) -> None:
    """Writes ``tensors``, the whole model's in ``dtype``, to the new folder ``path``.

    With ``fp8`` the matrices are in FP8 blocks, as DeepSeek-V3 is published.

    Collective: every rank calls it and iterates ``tensors``; global rank 0 writes. Configuration
    and tokenizer are copied from ``source``, the folder that the model came from. The folder
    appears complete or not at all. Rank 0 holds ``max_shard_bytes`` at a time. Raises
    ``ValueError`` if ``path`` exists.
    """
    tensors = with_mtp_copies(tensors, arch)
    if fp8:
        tensors = quantize_stream(tensors, arch)
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in tensors:
            pass
        return
    with new_folder(Path(path).expanduser()) as folder:
        write_safetensors(folder, tensors, max_shard_bytes)
        copy_config(Path(source).expanduser(), folder, arch, dtype, fp8=fp8)


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Writes ``tensors`` as one ``model.safetensors``, or as several files and their index.

    Raises:
        OSError: a file cannot be written: the disk is full, say.
    """
    # Copies: a view would keep the whole gathered parameter alive.
    held = ((name, tensor.to("cpu", copy=True)) for name, tensor in tensors)
    names: list[list[str]] = []
    total = 0
    for shard in split_by_bytes(held, max_shard_bytes):
        total += sum(tensor.nbytes for _, tensor in shard)
        _save(dict(shard), folder / f"shard-{len(names)}")
        names.append([name for name, _ in shard])
    if len(names) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    files = [f"model-{n + 1:05d}-of-{len(names):05d}.safetensors" for n in range(len(names))]
    for number, file in enumerate(files):
        (folder / f"shard-{number}").rename(folder / file)
    weight_map = {name: file for file, held in zip(files, names, strict=True) for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    file.touch()
    mode = file.stat().st_mode  # safetensors creates files that only the owner can read
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(mode)


def export_checkpoint(
    checkpoint: Path,
    config: Path,
    out: Path,
    arch: Architecture,
    stored: StoredModel,
    progress: ConversionProgress,
    max_file_bytes: int = GIB,
    dtype: torch.dtype | None = None,
    *,
    trust: bool = False,
) -> None:
    """Writes the weights of ``checkpoint`` to the new folder ``out``.

    Args:
        checkpoint: a run's, or an imported one; its manifest has been checked
        config: the folder that has configuration and tokenizer
        dtype: None leaves weights as they are stored
        trust: open the checkpoint, whatever it holds

    Raises:
        ValueError: ``checkpoint`` is not of ``arch``, or could run code; or see `new_folder`
        OSError: the disk is full, say
    """
    reader = TorchDistReader(checkpoint / POLICY, trust=trust)
    tensors = _stored_tensors(reader, stored, arch, dtype, progress)
    kept = dtype or reader.dtype(stored.chunks[owned_parameters(arch)[0].name][0])
    write_huggingface(out, config, tensors, arch, kept, max_file_bytes)


def _stored_tensors(
    reader: TorchDistReader,
    stored: StoredModel,
    arch: Architecture,
    dtype: torch.dtype | None,
    progress: ConversionProgress,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, as `sender.full_tensors` yields those of a model."""

    def pieces() -> Iterator[tuple[HfTensorSpec, Tensor]]:
        for parameter in owned_parameters(arch):
            # Buffers keep their fp32.
            kept = torch.float32 if parameter.rule.kind == "buffer" and dtype else dtype
            rows = [reader.read(chunk, kept) for chunk in stored.chunks[parameter.name]]
            # A chunk has leading dims of 1 if Megatron stores several parameters as one tensor.
            dims = len(parameter.tensors[0].shape)
            rows = [part.view(part.shape[part.ndim - dims :]) for part in rows]
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            named = to_huggingface(parameter, [whole], arch)
            progress.advance(parameter_numel(parameter), whole.nbytes)
            yield from zip(parameter.tensors, (values for _, values in named), strict=True)

    for name, group in groupby(pieces(), key=lambda piece: piece[0].sent_as):
        yield name, join_stacked(group, arch.num_experts)
