"""Hugging Face folders: safetensors files written tensor by tensor, their index, and the rest.

A safetensors file is the length of a header (8 bytes, little-endian), the header (JSON: dtype,
shape and place of every tensor) and the tensors' bytes
(https://github.com/huggingface/safetensors#format). So a file is begun once the names and shapes
are known, and no more than a tensor is held.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rltrain.weights.load import INDEX, SINGLE
from rltrain.weights.transport import tensor_bytes

_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Sink(Protocol):
    def write(self, data: Any, /) -> int: ...


def write_tensors(
    stream: Sink, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """One file: ``tensors`` are those of ``specs``, in that order.

    No dtype may follow a smaller one, or tensors would lie at addresses their dtype does not allow.
    """
    assert [s.dtype.itemsize for s in specs] == sorted(s.dtype.itemsize for s in specs)[::-1]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.nbytes
        kind = {"dtype": _NAMES[spec.dtype], "shape": spec.shape}
        header[spec.name] = {**kind, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for spec, (name, tensor) in zip(specs, tensors, strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (spec.name, spec.dtype, spec.shape)
        stream.write(tensor_bytes(tensor))


def shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def write_index(folder: Path, shards: Sequence[Sequence[TensorSpec]]) -> None:
    """Which file has which tensor, where there are several."""
    if len(shards) == 1:
        return
    names = shard_names(len(shards))
    weight_map = {
        spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard
    }
    total = sum(spec.nbytes for shard in shards for spec in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_the_rest(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Configuration and tokenizer of ``source``; ``dtype`` is what the configuration will name."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name != INDEX:
            shutil.copy2(file, folder / file.name)
    if dtype is None:
        return
    config = json.loads((source / "config.json").read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    name = str(dtype).removeprefix("torch.")
    if config.get(key) != name:
        config[key] = name
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
