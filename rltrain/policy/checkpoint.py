"""The policy's parameters and optimizer state in Megatron's distributed format.

``fully_reshardable``: what one layout saved another one loads. The format holds pickles, so what is
opened here must have been trusted first (`rltrain.controller.checkpoint`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from rltrain.policy.mesh import Mesh
from rltrain.policy.optimizer import LearningRate


def save(
    folder: str,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    learning_rate: LearningRate,
    mesh: Mesh,
) -> None:
    """Write into the empty folder ``folder``. Collective."""
    state = _sharded_state(chunks, optimizer, mesh, is_loading=False)
    state["updates"] = learning_rate.update
    plain = {name: value for name, value in _metadata(mesh).items() if name != "dp_cp_group"}
    dist_checkpointing.save(state, folder, content_metadata=plain)


def load(
    folder: str,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    learning_rate: LearningRate,
    mesh: Mesh,
) -> None:
    """Read what `save` wrote, in this layout or another. Collective."""
    state = dist_checkpointing.load(
        _sharded_state(chunks, optimizer, mesh, is_loading=True), folder
    )
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    learning_rate.update = state["updates"]


def _sharded_state(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    mesh: Mesh,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    metadata = _metadata(mesh)
    models = {
        f"model{number}": chunk.module.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    return {
        **models,
        "optimizer": optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata),
        "updates": 0,
    }


def _metadata(mesh: Mesh) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mesh.dp_cp_group,
    }
