"""Megatron's parameters from Hugging Face tensors and back, whole or cut over ranks. Pure.

`to_megatron` makes a rank's local tensor from slices of the Hugging Face tensors. `to_huggingface`
makes the Hugging Face tensors from the local tensors of all ranks. They are exact inverses.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.grid import AxisPosition
from rltrain.weights.mapping.parameters import HfTensorSpec, ParameterSpec, WeightRule

Read = Callable[[HfTensorSpec, int, int, int], Tensor]
"""(tensor, dim, start, stop) -> that slice of it."""


def to_megatron(
    parameter: ParameterSpec, read: Read, arch: Architecture, axis: AxisPosition
) -> Tensor:
    """The tensor that rank ``axis.rank`` of ``axis.size`` holds; reads only what it needs."""
    rule = parameter.rule
    if axis.size == 1:
        return _join([read(t, 0, 0, t.shape[0]) for t in parameter.tensors], rule, arch)
    if _is_cut_inside_groups(rule, arch, axis.size):
        whole = _join([read(t, 0, 0, t.shape[0]) for t in parameter.tensors], rule, arch)
        return whole.chunk(axis.size)[axis.rank]
    assert rule.cut is not None
    slices = []
    for tensor in parameter.tensors:
        length = tensor.shape[rule.cut]
        if length % axis.size and not rule.padded:
            raise ValueError(
                f"{tensor.name}: dim {rule.cut} of shape {list(tensor.shape)} cannot be cut into "
                f"{axis.size} equal parts; "
                f"choose a {'tp' if parameter.expert is None else 'etp'} that divides {length}"
            )
        step = -(-length // axis.size)
        start, stop = (min(rank * step, length) for rank in (axis.rank, axis.rank + 1))
        part = read(tensor, rule.cut, start, stop)
        if rule.padded and part.shape[0] < step:
            part = torch.cat([part, part.new_zeros(step - part.shape[0], *part.shape[1:])])
        slices.append(part)
    return _join(slices, rule, arch)


def to_huggingface(
    parameter: ParameterSpec, shards: Sequence[Tensor], arch: Architecture
) -> list[tuple[str, Tensor]]:
    """The named Hugging Face tensors, from the local tensors of all ranks of the cutting axis.

    A parameter that is not cut has one shard. The results are contiguous and may share memory with
    the shards.
    """
    rule = parameter.rule
    if _is_cut_inside_groups(rule, arch, len(shards)):
        shards = [torch.cat(list(shards))]
    pieces = [_unjoin(shard, parameter, arch) for shard in shards]
    named = []
    for tensor, *parts in zip(parameter.tensors, *pieces, strict=True):
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=rule.cut or 0)
        if rule.padded:
            whole = whole[: tensor.shape[0]]
        assert whole.shape == tensor.shape, (parameter.name, tensor, whole.shape)
        named.append((tensor.name, whole.contiguous()))
    return named


def _is_cut_inside_groups(rule: WeightRule, arch: Architecture, size: int) -> bool:
    """With more ranks than key-value heads Megatron cuts the joined tensor inside the groups."""
    return rule.join == "qkv" and arch.num_kv_heads % size != 0


def _join(parts: list[Tensor], rule: WeightRule, arch: Architecture) -> Tensor:
    if rule.join == "qkv":
        groups = parts[1].shape[0] // arch.head_dim
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unjoin(tensor: Tensor, parameter: ParameterSpec, arch: Architecture) -> list[Tensor]:
    if parameter.rule.join == "qkv":
        queries = arch.num_heads // arch.num_kv_heads * arch.head_dim
        groups = tensor.reshape(-1, queries + 2 * arch.head_dim, *tensor.shape[1:])
        parts = torch.split(groups, [queries, arch.head_dim, arch.head_dim], dim=1)
        return [part.flatten(0, 1) for part in parts]
    if len(parameter.tensors) == 1:
        return [tensor]
    rows = [t.shape[0] for t in parameter.tensors]
    return list(torch.split(tensor, [n * tensor.shape[0] // sum(rows) for n in rows]))
