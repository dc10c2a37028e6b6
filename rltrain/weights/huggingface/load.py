"""Loads a Hugging Face folder into a Megatron model, each rank reading only what it holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.huggingface.tensor_files import StoredTensor, open_folder
from rltrain.weights.mapping.assembly import to_megatron
from rltrain.weights.mapping.grid import Grid, GridPosition
from rltrain.weights.mapping.local_parameters import local_parameters
from rltrain.weights.mapping.mtp import is_skipped_mtp, mtp_copies
from rltrain.weights.mapping.parameters import HfTensorSpec


@torch.no_grad()
def load_huggingface(
    path: str | Path, chunks: Sequence[nn.Module], arch: Architecture, mesh: Grid
) -> None:
    """Fills ``chunks`` (this rank's Megatron models) from the safetensors files in ``path``.

    Not collective. Values are cast to the dtype of the parameters; rows that pad the vocabulary
    become zero. Afterwards call Megatron's ``reload_model_params`` if the optimizer keeps master
    weights. Raises ``ValueError`` naming file and tensor if the folder is of another architecture.
    """
    checkpoint = open_checkpoint(path, arch)
    position = GridPosition.of(mesh)
    held = local_parameters(chunks, arch, position)
    for parameter in model_parameters(arch):
        if parameter.name not in held:
            continue
        target = held[parameter.name]
        source = to_megatron(parameter, checkpoint.read, arch, parameter.axis(position))
        assert source.shape == target.shape, (
            f"{parameter.name}: the model has {list(target.shape)}, the map {list(source.shape)}"
        )
        target.copy_(source)


def read_tensors(
    path: str | Path, arch: Architecture, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The folder's tensors as `sender.full_tensors` yields them: whole, one at a time."""
    checkpoint = open_checkpoint(path, arch)
    parameters = [p for p in model_parameters(arch) if not p.copy]
    tensors = ((p.rule.kind, tensor) for p in parameters for tensor in p.tensors)
    for name, group in groupby(tensors, key=lambda pair: pair[1].sent_as):
        kind, tensor = next(group)
        kept = torch.float32 if kind == "buffer" else dtype
        if name == tensor.name:
            yield name, checkpoint.read(tensor, 0, 0, tensor.shape[0]).to(kept)
        else:
            yield name, checkpoint.tensors[name].data[:].to(kept).contiguous()


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one folder by the name under which each is stored."""

    tensors: Mapping[str, StoredTensor]

    def stored_name(self, tensor: HfTensorSpec) -> str:
        """The name under which this folder has the tensor: its own, or that of all experts."""
        stacked = tensor.stacked
        if stacked and (
            stacked.only or (tensor.name not in self.tensors and stacked.name in self.tensors)
        ):
            return stacked.name
        return tensor.name

    def read(self, tensor: HfTensorSpec, dim: int, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` along ``dim`` of the tensor."""
        name = self.stored_name(tensor)
        stored = self.tensors[name].data
        if name == tensor.name:
            return stored[start:stop] if dim == 0 else stored[:, start:stop]
        assert tensor.stacked is not None and tensor.expert is not None
        return tensor.stacked.read(stored, tensor.expert, tensor.shape, dim, start, stop)


def open_checkpoint(path: str | Path, arch: Architecture) -> Checkpoint:
    """Opens the folder and checks the header of every file against the architecture.

    It reads no tensor, so it is fast enough to call before any actor starts. Raises ``ValueError``
    like `open_folder`, and if a tensor does not fit the architecture, naming file and tensor.
    """
    folder = Path(path).expanduser()
    checkpoint = Checkpoint(open_folder(folder))
    _check_tensors(checkpoint, folder, arch)
    return checkpoint


def _check_tensors(checkpoint: Checkpoint, folder: Path, arch: Architecture) -> None:
    wanted = set()
    for tensor in (t for parameter in model_parameters(arch) for t in parameter.tensors):
        name = checkpoint.stored_name(tensor)
        wanted.add(name)
        if name not in checkpoint.tensors:
            raise ValueError(
                f"{folder}: tensor {name} is in none of the safetensors files [RL3003]"
            )
        stored = checkpoint.tensors[name]
        shape = tensor.shape
        if name != tensor.name:
            assert tensor.stacked is not None
            shape = tensor.stacked.shape(arch.num_experts, shape)
        if tuple(stored.data.get_shape()) != shape:
            raise ValueError(
                f"{stored.file}: {name} has shape {stored.data.get_shape()}, "
                f"config.json asks for {list(shape)}"
                " [RL3004]"
            )
    if arch.tie_embeddings or arch.value_head:
        # Some checkpoints repeat the embedding there. A critic does not need it.
        wanted.add("lm_head.weight")
    wanted |= mtp_copies(arch).keys()
    if extra := sorted(
        name for name in checkpoint.tensors.keys() - wanted if not is_skipped_mtp(name, arch)
    ):
        raise ValueError(
            f"{checkpoint.tensors[extra[0]].file}: {extra[0]} belongs to no part of a "
            f"{arch.family} ({len(extra)} such tensors): the folder is of another architecture "
            "than its config.json says"
            " [RL3004]"
        )
