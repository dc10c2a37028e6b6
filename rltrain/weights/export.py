"""Writes the policy to a Hugging Face folder that transformers and vLLM load."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from rltrain.weights.architecture import Architecture
from rltrain.weights.files import INDEX, SINGLE
from rltrain.weights.mtp import MTP_FIELDS, with_copies
from rltrain.weights.placement import Grid
from rltrain.weights.sender import full_tensors

_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
GIB = 2**30


def export_huggingface(
    path: str | Path,
    source: str | Path,
    chunks: Sequence[nn.Module],
    arch: Architecture,
    mesh: Grid,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = GIB,
) -> None:
    """Writes the weights of ``chunks`` in ``dtype`` to the new folder ``path``.

    Collective: every rank calls it, global rank 0 writes. Configuration and tokenizer are copied
    from ``source``, the folder that the model came from. The folder is written beside and renamed,
    so it is there whole or not at all. Rank 0 holds ``max_shard_bytes`` at a time. Raises
    ``ValueError`` when ``path`` exists.
    """
    tensors = full_tensors(chunks, arch, mesh, dtype)
    write_huggingface(path, source, tensors, arch, dtype, max_shard_bytes)


def write_huggingface(
    path: str | Path,
    source: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    arch: Architecture,
    dtype: torch.dtype,
    max_shard_bytes: int = GIB,
) -> None:
    """As `export_huggingface`, of ``tensors`` in ``dtype``, which every rank iterates."""
    tensors = with_copies(tensors, arch)
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
        _copy_the_rest(Path(source).expanduser(), partial, dtype, arch)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Writes ``tensors`` as one ``model.safetensors``, or as several files and their index."""
    files: list[tuple[Path, list[str]]] = []
    total = 0
    for number, shard in enumerate(_shards(tensors, max_shard_bytes), start=1):
        file = folder / f"shard-{number}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        files.append((file, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:
        files[0][0].rename(folder / SINGLE)
        return
    weight_map = {}
    for number, (file, names) in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file.rename(folder / name)
        weight_map.update(dict.fromkeys(names, name))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(
    tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, held = {}, 0
        # A copy of its own: a view would keep the whole gathered parameter alive, and safetensors
        # refuses tensors that share memory.
        shard[name] = tensor.to("cpu", copy=True)
        held += tensor.nbytes
    yield shard


def _copy_the_rest(source: Path, folder: Path, dtype: torch.dtype, arch: Architecture) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name != INDEX:
            shutil.copy2(file, folder / file.name)
    given = json.loads((source / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in given else "dtype"
    config = {**given, key: str(dtype).removeprefix("torch.")}
    for name in given.keys() & set(MTP_FIELDS):
        config[name] = arch.mtp_layers  # what was skipped is not in the exported folder
    if config != given:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
