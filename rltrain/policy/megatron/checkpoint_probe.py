"""Finds where Megatron stores each parameter in a checkpoint, without allocating the model.

The model is built on one rank, with meta tensors. Its ``sharded_state_dict`` gives the keys and the
offsets in the global tensors, which are the same in every layout.
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

_RESULT = "stored.json"


def stored_model(arch: Architecture) -> StoredModel:
    """Where the parameters of ``arch`` are stored. Runs Megatron in a CPU process of its own."""
    with TemporaryDirectory() as folder:
        run_ranks(
            _describe, 1, Path(folder), arch, timeout_s=3600
        )  # models may have 50,000 parameters
        return StoredModel.from_json((Path(folder) / _RESULT).read_text())


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
    assert len(objects) == len(state), f"not parameters: {sorted(state)[:5]}"
    assert all(value.data is None for value in state.values())
    stored = StoredModel(chunks, tuple(objects), content_metadata(mesh))
    (folder / _RESULT).write_text(stored.to_json())


class _NoStorage(TorchFunctionMode):
    """Makes ``torch.empty``, which allocates every matrix, return meta tensors."""

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
