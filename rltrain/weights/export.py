"""Writes a Hugging Face folder that transformers and vLLM load, from live ranks or a checkpoint."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.weights.architecture import Architecture
from rltrain.weights.engine_fp8 import in_fp8
from rltrain.weights.journal import Journal
from rltrain.weights.layout import HfTensor, Parameter
from rltrain.weights.manifest import MANIFEST, entry_of
from rltrain.weights.mapping import disassemble
from rltrain.weights.mtp import with_copies
from rltrain.weights.safetensors_file import (
    TensorSpec,
    copy_the_rest,
    shard_names,
    write_index,
    write_tensors,
)
from rltrain.weights.sender import put_together
from rltrain.weights.stored import POLICY, Progress, StoredModel, numel, owned
from rltrain.weights.torch_dist import Reader

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

    Collective: every rank calls it and iterates ``tensors``, global rank 0 writes. Configuration
    and tokenizer are copied from ``source``, the folder that the model came from. The folder is
    written beside and renamed, so it is there whole or not at all. Rank 0 holds
    ``max_shard_bytes`` at a time. Raises ``ValueError`` when ``path`` exists.
    """
    tensors = with_copies(tensors, arch)
    if fp8:
        tensors = in_fp8(tensors, arch)
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in tensors:
            pass
        return
    target = Path(path).expanduser()
    if target.exists():
        raise ValueError(f"{target} exists already: choose another folder to export to")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        write_safetensors(partial, tensors, max_shard_bytes)
        copy_the_rest(Path(source).expanduser(), partial, arch, dtype, fp8=fp8)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Writes ``tensors`` as one ``model.safetensors``, or as several files and their index."""
    shards: list[list[TensorSpec]] = []
    for number, held in enumerate(_held_shards(tensors, max_shard_bytes), start=1):
        # The sort keeps every tensor's place aligned to its dtype.
        held.sort(key=lambda named: -named[1].dtype.itemsize)
        shards.append([TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in held])
        with open(folder / f"shard-{number}", "wb") as file:
            write_tensors(file, shards[-1], held)
    for number, name in enumerate(shard_names(len(shards)), start=1):
        (folder / f"shard-{number}").rename(folder / name)
    write_index(folder, shards)


def _held_shards(
    tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    shard: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, held = [], 0
        # A copy of its own: a view would keep the whole gathered parameter alive.
        shard.append((name, tensor.to("cpu", copy=True)))
        held += tensor.nbytes
    yield shard


Group = tuple[Parameter, ...]
"""Parameters whose tensors are written together: one, or all experts of a layer in a family that
has no tensor per expert."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights in a checkpoint's ``policy/``, read as Hugging Face tensors.

    ``dtype`` None leaves them as they are stored; buffers keep their fp32 whatever it is.
    """

    reader: Reader
    stored: StoredModel
    arch: Architecture
    dtype: torch.dtype | None

    def dtype_of(self, parameter: Parameter) -> torch.dtype:
        if self.dtype is None:
            return self.reader.dtype(self.stored.chunks[parameter.name][0])
        return torch.float32 if parameter.rule.kind == "buffer" else self.dtype

    def groups(self) -> Iterator[Group]:
        for _, group in groupby(owned(self.arch), key=lambda p: [t.sent_as for t in p.tensors]):
            yield tuple(group)

    def specs(self, group: Group) -> list[TensorSpec]:
        """Of what `read` gives."""
        dtype = self.dtype_of(group[0])
        sent = {t.sent_as: t for p in group for t in p.tensors}
        shapes = ((name, t.sent_shape(self.arch.num_experts)) for name, t in sent.items())
        return [TensorSpec(name, dtype, shape) for name, shape in with_copies(shapes, self.arch)]

    def read(self, group: Group) -> Iterator[tuple[str, Tensor]]:
        pieces = (piece for parameter in group for piece in self._read(parameter))
        sent = groupby(pieces, key=lambda piece: piece[0].sent_as)
        whole = ((name, put_together(of, self.arch.num_experts)) for name, of in sent)
        return with_copies(whole, self.arch)

    def _read(self, parameter: Parameter) -> Iterator[tuple[HfTensor, Tensor]]:
        chunks = [self.reader.read(chunk) for chunk in self.stored.chunks[parameter.name]]
        # A chunk has leading ones where Megatron keeps many parameters as one tensor.
        dims = len(parameter.tensors[0].shape)
        rows = [chunk.reshape(chunk.shape[chunk.ndim - dims :]) for chunk in chunks]
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        named = disassemble(parameter, [whole.to(self.dtype_of(parameter))], self.arch)
        for tensor, (_, values) in zip(parameter.tensors, named, strict=True):
            yield tensor, values


def export_checkpoint(
    checkpoint: Path,
    config: Path,
    out: Path,
    arch: Architecture,
    stored: StoredModel,
    progress: Progress,
    max_file_bytes: int = GIB,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the weights of ``checkpoint`` to the new folder ``out``, one `Group` at a time.

    Args:
        checkpoint: a run's, or an imported one; its manifest has been checked
        config: the folder that has configuration and tokenizer

    Raises:
        ValueError: ``checkpoint`` is not of ``arch``; or see `Journal`
        OSError: the disk is full, say. The same call goes on from there.
    """
    weights = StoredWeights(Reader(checkpoint / POLICY), stored, arch, dtype)
    shards = list(_shards(weights, max_file_bytes))
    specs = [[spec for group in shard for spec in weights.specs(group)] for shard in shards]
    identity = {
        "source": [entry_of(checkpoint / MANIFEST), entry_of(config / "config.json")],
        "dtype": str(dtype),
        "max file": max_file_bytes,
    }
    with Journal(out, identity) as journal:
        for number, name in enumerate(shard_names(len(shards))):
            if number < len(journal.parts):
                progress.advance(sum(map(_numel, shards[number])), 0)
                continue
            with journal.part(name) as part:
                write_tensors(part, specs[number], _read(weights, shards[number], progress))
        write_index(journal.folder, specs)
        copy_the_rest(config, journal.folder, arch, weights.dtype_of(owned(arch)[0]))
        journal.finish(with_manifest=False)


def _shards(weights: StoredWeights, max_file_bytes: int) -> Iterator[list[Group]]:
    shard: list[Group] = []
    held = 0
    for group in weights.groups():
        nbytes = sum(spec.nbytes for spec in weights.specs(group))
        if shard and held + nbytes > max_file_bytes:
            yield _aligned(shard, weights)
            shard, held = [], 0
        shard.append(group)
        held += nbytes
    yield _aligned(shard, weights)


def _aligned(shard: list[Group], weights: StoredWeights) -> list[Group]:
    return sorted(shard, key=lambda group: -weights.dtype_of(group[0]).itemsize)


def _numel(group: Group) -> int:
    return sum(map(numel, group))


def _read(
    weights: StoredWeights, shard: Sequence[Group], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    for group in shard:
        for name, tensor in weights.read(group):
            yield name, tensor
            progress.advance(0, tensor.nbytes)
        progress.advance(_numel(group), 0)
