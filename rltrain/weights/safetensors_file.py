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

from rltrain.weights.architecture import Architecture
from rltrain.weights.engine_fp8 import fp8_config
from rltrain.weights.files import INDEX, SINGLE
from rltrain.weights.mtp import MTP_FIELDS
from rltrain.weights.transport import tensor_bytes

_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


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


def copy_the_rest(
    source: Path, folder: Path, arch: Architecture, dtype: torch.dtype, *, fp8: bool = False
) -> None:
    """Configuration and tokenizer of ``source``, for weights of ``arch`` in ``dtype``."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name != INDEX:
            shutil.copy2(file, folder / file.name)
    given = json.loads((source / "config.json").read_text())
    written = _config(given, arch, dtype, fp8=fp8)
    if written != given:
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _config(
    given: dict[str, Any], arch: Architecture, dtype: torch.dtype, *, fp8: bool
) -> dict[str, Any]:
    """The source's, where it says how weights are stored and which there are, made true."""
    written = {n: value for n, value in given.items() if n != "quantization_config"}
    key = "torch_dtype" if "torch_dtype" in given else "dtype"
    written[key] = str(dtype).removeprefix("torch.")
    for name in given.keys() & set(MTP_FIELDS):
        written[name] = arch.mtp_layers  # what was skipped is not in the exported folder
    if fp8:
        written["quantization_config"] = fp8_config(arch)
    return written
