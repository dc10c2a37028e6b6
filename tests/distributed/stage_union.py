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
    from rltrain.weights.sync.sender import stage_tensors

    own: list[str] = []
    for name, tensor in stage_tensors(chunks, arch, mesh, torch.bfloat16):
        own.append(name)
        assert torch.equal(tensor, whole[name].to(tensor.dtype)), name
    stages: list[Any] = [None] * mesh.pp_size
    if mesh.pp_size > 1:
        dist.all_gather_object(stages, own, group=mesh.pp_group)
    else:
        stages = [own]
    assert all(stages) and stages[mesh.pp_rank] == own
    assert sorted(name for stage in stages for name in stage) == sorted(whole)
