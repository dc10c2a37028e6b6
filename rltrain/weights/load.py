"""Loads a Hugging Face folder into a Megatron model, each rank reading only what it holds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rltrain.weights.architecture import Architecture
from rltrain.weights.families import parameters
from rltrain.weights.layout import HfTensor
from rltrain.weights.local import local_parameters
from rltrain.weights.mapping import assemble
from rltrain.weights.placement import Grid, Placement

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32", "F16", "BF16"}


@torch.no_grad()
def load_huggingface(
    path: str | Path, chunks: Sequence[nn.Module], arch: Architecture, mesh: Grid
) -> None:
    """Fills ``chunks`` (this rank's Megatron models) from the safetensors files in ``path``.

    Not collective. Values are cast to the dtype of the parameters; rows that pad the vocabulary
    become zero. An optimizer that keeps master weights must be told after this (Megatron's
    ``reload_model_params``). Raises ``ValueError`` naming file and tensor when the folder is not
    exactly this architecture's.
    """
    checkpoint = open_checkpoint(path, arch)
    placement = Placement.of(mesh)
    held = local_parameters(chunks, arch, placement)
    for parameter in parameters(arch):
        if parameter.name not in held:
            continue
        target = held[parameter.name]
        source = assemble(parameter, checkpoint.read, arch, parameter.axis(placement))
        assert source.shape == target.shape, (
            f"{parameter.name}: the model has {list(target.shape)}, the map {list(source.shape)}"
        )
        target.copy_(source)


@dataclass(frozen=True)
class Checkpoint:
    """The open safetensors files of one folder. ``files`` is by the name of each stored tensor."""

    files: dict[str, Path]
    handles: dict[Path, Any]

    def slice_of(self, name: str) -> Any:
        return self.handles[self.files[name]].get_slice(name)

    def stored_name(self, tensor: HfTensor) -> str:
        """The name under which the tensor lies here: its own, or that of all experts together."""
        if tensor.name not in self.files and tensor.stacked in self.files:
            assert tensor.stacked is not None
            return tensor.stacked
        return tensor.name

    def read(self, tensor: HfTensor, dim: int, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` along ``dim`` of the tensor."""
        name = self.stored_name(tensor)
        stored = self.slice_of(name)
        if name == tensor.name:
            result = stored[start:stop] if dim == 0 else stored[:, start:stop]
        else:
            first = tensor.rows[0] * tensor.shape[0]
            if dim == 0:
                result = stored[tensor.expert, first + start : first + stop]
            else:
                rows = slice(first, first + tensor.shape[0])
                result = stored[tensor.expert, rows, start:stop]
        assert isinstance(result, Tensor)
        return result


def open_checkpoint(path: str | Path, arch: Architecture) -> Checkpoint:
    """Opens the folder and checks the header of every file against the architecture.

    Reads no tensor, so it is quick enough to call before any actor starts.
    """
    folder = Path(path).expanduser()
    declared = _declared_files(folder)
    handles = {file: _open(file) for file in sorted(set(declared.values()))}
    files = {name: file for file, handle in handles.items() for name in handle.keys()}  # noqa: SIM118
    for name, file in declared.items():
        if name and files.get(name) != file:
            raise ValueError(f"{folder / INDEX} says that {name} is in {file}, and it is not there")
    checkpoint = Checkpoint(files, handles)
    _check_tensors(checkpoint, folder, arch)
    return checkpoint


def _declared_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index; a folder with a single file has no names here."""
    if (folder / SINGLE).is_file():
        return {"": folder / SINGLE}
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}: weights are read from safetensors only"
        )
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {str(name): folder / str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name, file in files.items():
        if not file.is_file():
            raise ValueError(f"{file} is missing; {index} says that it holds {name}")
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a whole safetensors file ({error}): it may be truncated; fetch it again"
        ) from error


def _check_tensors(checkpoint: Checkpoint, folder: Path, arch: Architecture) -> None:
    wanted = set()
    for tensor in (t for parameter in parameters(arch) for t in parameter.tensors):
        name = checkpoint.stored_name(tensor)
        wanted.add(name)
        if name not in checkpoint.files:
            raise ValueError(f"{folder}: tensor {name} is in none of the safetensors files")
        found = checkpoint.slice_of(name)
        shape = tensor.shape
        if name != tensor.name:
            shape = (arch.num_experts, tensor.rows[1] * shape[0], *shape[1:])
        if tuple(found.get_shape()) != shape:
            raise ValueError(
                f"{checkpoint.files[name]}: {name} has shape {found.get_shape()}, "
                f"config.json asks for {list(shape)}"
            )
        if found.get_dtype() not in _DTYPES:
            raise ValueError(
                f"{checkpoint.files[name]}: {name} is {found.get_dtype()}; "
                f"only {', '.join(sorted(_DTYPES))} are supported, no quantised weights"
            )
    if arch.tie_embeddings:
        wanted.add("lm_head.weight")  # Some checkpoints repeat the embedding there.
    if extra := sorted(checkpoint.files.keys() - wanted):
        raise ValueError(
            f"{checkpoint.files[extra[0]]}: {extra[0]} belongs to no part of a {arch.family} "
            f"({len(extra)} such tensors): the folder is of another architecture than its "
            "config.json says"
        )
