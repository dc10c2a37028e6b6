"""Asks Megatron where it keeps each parameter in a checkpoint, without a model's memory.

The model is built on one rank with no storage behind its tensors: its ``sharded_state_dict`` gives
keys and places in the global tensors, which are the same in every layout.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.overrides import TorchFunctionMode

from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.policy.megatron.megatron_model import build_model
from rltrain.policy.megatron.mesh import init_mesh
from rltrain.policy.model_checkpoint import content_metadata, sharded_metadata
from rltrain.policy.ranks import rendezvous, run_ranks
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.stored_model import Chunk, StoredModel, owned_parameters

_FOUND = "stored.json"


def stored_model(arch: Architecture) -> StoredModel:
    """Where the parameters of ``arch`` lie. Megatron runs in a process of its own, on the CPU."""
    with TemporaryDirectory() as folder:
        run_ranks(_describe, 1, Path(folder), arch, timeout_s=3600)  # it has 50,000 parameters, say
        return StoredModel.from_json((Path(folder) / _FOUND).read_text())


def _describe(rank: int, folder: Path, arch: Architecture) -> None:
    cpu = torch.device("cpu")
    mesh = init_mesh(ParallelConfig(), rank, 1, rendezvous(folder, "stored"), cpu)
    with _NoStorage():
        model: Any
        (model,) = build_model(
            arch, PolicyConfig(), mesh, device=cpu, routing_replay=False, ddp=False
        )
        state: dict[str, Any] = model.sharded_state_dict(metadata=sharded_metadata(mesh))
    chunks = {p.name: _chunks(p.name, state.pop(p.name)) for p in owned_parameters(arch)}
    objects = [value.unique_key for value in state.values() if isinstance(value, ShardedObject)]
    assert len(objects) == len(state), f"no parameter is {sorted(state)[:5]}"
    assert all(value.data is None for value in state.values())
    found = StoredModel(chunks, tuple(objects), content_metadata(mesh))
    (folder / _FOUND).write_text(found.to_json())


class _NoStorage(TorchFunctionMode):
    """Every matrix is made by ``torch.empty``: here it has a shape and nothing else."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        changed = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **changed})


def _chunks(name: str, value: Any) -> tuple[Chunk, ...]:
    shards = value.build() if isinstance(value, ShardedTensorFactory) else [value]
    rows = {shard.local_shape[0] for shard in shards}
    assert len(rows) == 1 and sum(s.local_shape[0] for s in shards) == value.data.shape[0], name
    return tuple(_chunk(shard) for shard in shards)


def _chunk(shard: ShardedTensor) -> Chunk:
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return Chunk(shard.key, tuple(shard.global_offset), shape, tuple(shard.global_shape))
