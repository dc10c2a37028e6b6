"""Weights that depend only on their Hugging Face names: the same model in every layout."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.assembly import to_megatron
from rltrain.weights.mapping.grid import Grid, GridPosition
from rltrain.weights.mapping.local_parameters import local_parameters
from rltrain.weights.mapping.parameters import HfTensorSpec


def seeded_tensor(tensor: HfTensorSpec) -> Tensor:
    """Norms are near 1. Other weights are large, so that a changed route changes the result."""
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:4], "big")
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return 1 + values / 5 if len(tensor.shape) == 1 else values / 4


@torch.no_grad()
def fill_seeded(
    chunks: Sequence[nn.Module],
    arch: Architecture,
    mesh: Grid,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Same as loading a checkpoint of `seeded_tensor` weights that is stored in ``dtype``."""

    def read(tensor: HfTensorSpec, dim: int, start: int, stop: int) -> Tensor:
        return seeded_tensor(tensor).to(dtype).float().narrow(dim, start, stop - start)

    position = GridPosition.of(mesh)
    held = local_parameters(chunks, arch, position)
    for parameter in model_parameters(arch):
        if parameter.name in held:
            source = to_megatron(parameter, read, arch, parameter.axis(position))
            held[parameter.name].copy_(source)
