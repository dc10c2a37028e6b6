"""What each pipeline stage sends of a model: together all of it, and nothing twice."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def check_stages(chunks: Any, arch: Any, mesh: Any, whole: Mapping[str, Tensor]) -> None:
    """Collective.

    Args:
        whole: every tensor of the model, fp32
    """
    ranks = mesh.world_size // mesh.pp_size
    firsts = [stage * ranks for stage in range(mesh.pp_size)]
    several = [rank for rank in range(mesh.world_size) if rank % 4 != 1]
    stages = {
        tuple(roots): _check(chunks, arch, mesh, whole, roots)
        for roots in (firsts, [first + ranks - 1 for first in firsts], several)
    }
    [named] = {tuple(map(tuple, names)) for names in stages.values()}
    assert all(named)
    assert sorted(name for stage in named for name in stage) == sorted(whole)


def _check(
    chunks: Any, arch: Any, mesh: Any, whole: Mapping[str, Tensor], roots: list[int]
) -> list[list[str]]:
    """The names by stage. Roots have the values, others know dtypes and shapes."""
    from rltrain.weights.sync.gathering import Gathering
    from rltrain.weights.sync.sender import stage_tensors

    own: list[str] = []
    gathering = Gathering(mesh.rank, roots)
    for name, tensor in stage_tensors(chunks, arch, mesh, torch.bfloat16, gathering):
        own.append(name)
        expected = whole[name].to(tensor.dtype)
        assert tensor.shape == expected.shape
        assert tensor.is_meta == (mesh.rank not in roots), name
        assert tensor.is_meta or torch.equal(tensor, expected), name
    stages: list[Any] = [own]
    if mesh.pp_size > 1:
        stages = [None] * mesh.pp_size
        dist.all_gather_object(stages, own, group=mesh.pp_group)
    assert stages[mesh.pp_rank] == own
    return stages
