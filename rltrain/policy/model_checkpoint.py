"""A model's parameters and optimizer state in Megatron's distributed format.

The format is ``fully_reshardable``: a checkpoint of one layout can be loaded in another. It
contains pickles, so a folder is looked through before Megatron opens it, unless it is trusted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.megatron.value_head import ValueHead
from rltrain.policy.optimizer import LearningRate
from rltrain.policy.rank_save import RankSave
from rltrain.policy.sharded_save import stage
from rltrain.weights.huggingface.manifest import ManifestEntry
from rltrain.weights.huggingface.plain_checkpoint import check_runs_no_code

_HEAD = "output_layer.weight"
_SETTINGS = ("max_lr", "min_lr", "betas", "eps", "weight_decay")
"""Of the optimizer's parameter groups; a checkpoint holds them, too."""


def save_model(
    folder: str,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    learning_rate: LearningRate,
    mesh: Mesh,
) -> dict[str, ManifestEntry]:
    """Write into ``folder``, which is empty or absent. Collective.

    Returns:
        of the files that this rank wrote

    Raises:
        OSError: on all ranks, where one could not write; all are usable afterwards.
    """
    save = begin_model(folder, chunks, optimizer, learning_rate, mesh, in_background=False)
    return save.finish()


def begin_model(
    folder: str,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    learning_rate: LearningRate,
    mesh: Mesh,
    *,
    in_background: bool = True,
) -> RankSave:
    """As `save_model`, which ends with `RankSave.finish`; until then the model may change, if this
    rank writes in the background. Collective."""
    state = _sharded_state(chunks, optimizer, mesh, is_loading=False)
    state["updates"] = learning_rate.update
    return _begin(state, folder, mesh, in_background=in_background)


def load_model(
    folder: str,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    learning_rate: LearningRate,
    mesh: Mesh,
    *,
    trust: bool = False,
) -> None:
    """Read what `save_model` wrote, in this layout or another. Collective.

    What the configuration sets of the optimizer stays as it is set now.

    Args:
        trust: open it, whatever it holds

    Raises:
        ValueError: it could run code.
    """
    if not trust:
        check_runs_no_code(Path(folder))
    state = dist_checkpointing.load(
        _sharded_state(chunks, optimizer, mesh, is_loading=True), folder
    )
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    own = [{key: group[key] for key in _SETTINGS} for group in optimizer.param_groups]
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    learning_rate.update = state["updates"]


def save_weights(
    folder: str, chunks: Sequence[torch.nn.Module], mesh: Mesh
) -> dict[str, ManifestEntry]:
    """As `save_model`, the parameters alone."""
    return begin_weights(folder, chunks, mesh, in_background=False).finish()


def begin_weights(
    folder: str, chunks: Sequence[torch.nn.Module], mesh: Mesh, *, in_background: bool = True
) -> RankSave:
    """As `begin_model`, the parameters alone."""
    return _begin(_model_states(_bare(chunks), mesh), folder, mesh, in_background=in_background)


def _begin(state: dict[str, Any], folder: str, mesh: Mesh, *, in_background: bool) -> RankSave:
    staged = stage(state, Path(folder), content_metadata(mesh), copies=in_background)
    return RankSave(staged, mesh.rank, in_background=in_background)


def load_weights(
    folder: str, chunks: Sequence[torch.nn.Module], mesh: Mesh, *, trust: bool = False
) -> None:
    """Read only the parameters of what `save_model`, `save_weights` or ``rltrain import`` wrote.

    Collective. Values are cast to the dtype of the parameters. Rows that pad the vocabulary become
    zero. Two things are not read, and the model keeps its own: Transformer Engine's extra state,
    and a critic's head. ``trust`` as in `load_model`.
    """
    if not trust:
        check_runs_no_code(Path(folder))
    bare = _bare(chunks)
    not_read: tuple[str, ...] = ("_extra_state",)
    wanted = _model_states(bare, mesh)
    for number, model in enumerate(bare):
        if isinstance(getattr(model, "output_layer", None), ValueHead):
            not_read = (*not_read, _HEAD)
            del wanted[f"model{number}"][_HEAD]
    state = dist_checkpointing.load(wanted, folder)
    for number, model in enumerate(bare):
        left = model.load_state_dict(state[f"model{number}"], strict=False)
        assert all(name.endswith(not_read) for name in left.missing_keys), left
        assert not left.unexpected_keys, left


def _bare(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    return [c.module if isinstance(c, DistributedDataParallel) else c for c in chunks]


def _model_states(bare: Sequence[Any], mesh: Mesh) -> dict[str, Any]:
    """The tensors of each chunk, without Transformer Engine's extra state."""
    metadata = sharded_metadata(mesh)
    return {
        f"model{number}": {
            name: value
            for name, value in model.sharded_state_dict(metadata=metadata).items()
            if not isinstance(value, ShardedObject)
        }
        for number, model in enumerate(bare)
    }


def _sharded_state(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    mesh: Mesh,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    metadata = sharded_metadata(mesh)
    models = {
        f"model{number}": chunk.module.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    return {
        **models,
        "optimizer": optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata),
        "updates": 0,
    }


def sharded_metadata(mesh: Mesh) -> dict[str, Any]:
    """The ``metadata`` argument of ``sharded_state_dict``."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mesh.dp_cp_group,
    }


def content_metadata(mesh: Mesh) -> dict[str, Any]:
    """`sharded_metadata` without process groups, to be written into the checkpoint."""
    metadata = sharded_metadata(mesh)
    del metadata["dp_cp_group"]
    return metadata
