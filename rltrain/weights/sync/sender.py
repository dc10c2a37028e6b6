"""The policy's side of weight sync: every tensor of the model, whole, under its Hugging Face name.

A sync sends the tensors of each pipeline stage from a rank of that stage: `stage_tensors`. Export
to a folder, and a sync to engines on the policy's own GPUs, need all of them: `full_tensors`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.assembly import to_huggingface
from rltrain.weights.mapping.grid import AxisPosition, Grid, GridPosition
from rltrain.weights.mapping.local_parameters import local_parameters
from rltrain.weights.mapping.parameters import HfTensorSpec, ParameterSpec
from rltrain.weights.sync.gathering import Gathering, all_gather


def parameter_data(parameter: Tensor) -> Tensor:
    return parameter.data


@torch.no_grad()
def full_tensors(
    chunks: Sequence[nn.Module],
    arch: Architecture,
    mesh: Grid,
    dtype: torch.dtype,
    value: Callable[[Tensor], Tensor] = parameter_data,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, full tensor in ``dtype``), the same on every rank.

    Collective over the groups of ``mesh``: all ranks must run the iterator to its end, in step.
    Architecture and ``ep`` determine the order. Memory: one parameter at a time, or one expert of
    each expert-parallel rank. A family without tensors per expert also needs one tensor of all
    experts of a layer. The tensors are contiguous and must not be written to. They may be the
    parameters themselves or share memory, so copy what must outlive the next optimizer step.

    ``value`` selects what is gathered of a parameter: its weights, or a tensor of the same shape,
    like ``lambda p: p.main_grad``. Only weights are gathered of parameters that are not trained.
    Buffers stay fp32 whatever ``dtype``.
    """
    yield from _joined(_pieces(chunks, arch, mesh, dtype, value), arch)


@torch.no_grad()
def stage_tensors(
    chunks: Sequence[nn.Module],
    arch: Architecture,
    mesh: Grid,
    dtype: torch.dtype,
    gathering: Gathering,
) -> Iterator[tuple[str, Tensor]]:
    """As `full_tensors`, but only the tensors of this rank's pipeline stage: those of all its
    chunks. The stages together yield every tensor of the model once.

    The first tensor is collective over all ranks, since the stages agree on who sends what more
    than one of them holds (tied embeddings, the embedding of MTP layers). Later ones are collective
    over the ranks of the stage. No weight passes between stages.

    Only the roots of ``gathering`` yield values. Other ranks yield tensors on the device "meta".
    """
    pieces = _pieces(chunks, arch, mesh, dtype, parameter_data, gathering)
    yield from _joined(pieces, arch)


def _joined(
    pieces: Iterator[tuple[HfTensorSpec, Tensor]], arch: Architecture
) -> Iterator[tuple[str, Tensor]]:
    for name, group in groupby(pieces, key=lambda piece: piece[0].sent_as):
        yield name, join_stacked(group, arch.num_experts)


def join_stacked(pieces: Iterator[tuple[HfTensorSpec, Tensor]], num_experts: int) -> Tensor:
    """The tensor of all experts, from the pieces of one; each is copied as it arrives."""
    first, whole = next(pieces)
    if first.sent_as == first.name:
        return whole
    pieces = chain([(first, whole)], pieces)
    whole = whole.new_empty(first.sent_shape(num_experts))
    filled = 0
    for tensor, values in pieces:
        assert tensor.stacked is not None and tensor.expert is not None
        tensor.stacked.within(whole, tensor.expert).copy_(values)
        filled += values.numel()
    assert filled == whole.numel()
    return whole


def _pieces(
    chunks: Sequence[nn.Module],
    arch: Architecture,
    mesh: Grid,
    dtype: torch.dtype,
    value: Callable[[Tensor], Tensor],
    of_stage: Gathering | None = None,
) -> Iterator[tuple[HfTensorSpec, Tensor]]:
    """Every tensor of the model, on every rank, one expert at a time.

    Args:
        of_stage: only the tensors of this rank's pipeline stage, on the ranks that need them
    """
    position = GridPosition.of(mesh)
    held = local_parameters(chunks, arch, position)
    owned = [
        parameter
        for parameter in model_parameters(arch)
        if not parameter.copy and (value is parameter_data or parameter.rule.kind == "trained")
    ]
    stages = _stages(owned, held, position.pp)
    for batch in _batches(owned, position.ep.size):
        kept = torch.float32 if batch[0].rule.kind == "buffer" else dtype
        stage = stages[batch[0].name]
        if stage == position.pp.rank:
            pieces = _gather(batch, held, arch, position, kept, value, of_stage or Gathering())
        elif of_stage is not None:
            continue
        else:
            device = next(iter(held.values())).device
            pieces = _empty(batch, kept, device)
        for _, values in pieces if position.pp.size > 1 and of_stage is None else ():
            dist.broadcast(values, group=position.pp.group, group_src=stage)
        yield from pieces


def _stages(
    owned: Sequence[ParameterSpec], held: Mapping[str, Tensor], pp: AxisPosition
) -> dict[str, int]:
    """Megatron name -> the pipeline stage that holds it."""
    layers = {parameter.layer for parameter in owned if parameter.name in held}
    mine = [p.name in held if p.layer is None else p.layer in layers for p in owned]
    if pp.size == 1:
        assert all(mine)
        return dict.fromkeys((parameter.name for parameter in owned), 0)
    device = next(iter(held.values())).device
    stage = torch.where(torch.tensor(mine, device=device), pp.rank, pp.size)
    dist.all_reduce(stage, op=dist.ReduceOp.MIN, group=pp.group)
    assert int(stage.max()) < pp.size, "no pipeline stage has some of the parameters"
    return {p.name: n for p, n in zip(owned, stage.tolist(), strict=True)}


def _batches(owned: Sequence[ParameterSpec], ep: int) -> Iterator[list[ParameterSpec]]:
    """Parameters to gather together: one, or one expert of each expert-parallel rank."""
    for (_, rule), group in groupby(owned, key=lambda p: (p.layer, p.rule)):
        parameters = list(group)
        if parameters[0].expert is None:
            assert len(parameters) == 1, rule
            yield parameters
        else:
            num_local = len(parameters) // ep
            yield from (parameters[local::num_local] for local in range(num_local))


def _gather(
    batch: Sequence[ParameterSpec],
    held: Mapping[str, Tensor],
    arch: Architecture,
    position: GridPosition,
    dtype: torch.dtype,
    value: Callable[[Tensor], Tensor],
    gathering: Gathering,
) -> list[tuple[HfTensorSpec, Tensor]]:
    """The Hugging Face tensors of a batch, on the ranks of the stage that holds it."""
    ep = position.ep if batch[0].expert is not None else AxisPosition()
    mine = batch[ep.rank]
    local = value(held[mine.name]).detach().to(dtype).contiguous()
    if batch[0].expert is None:
        shards = gathering.collect(local, mine.axis(position))
        by_cut_then_expert = [[shard] for shard in shards or ()]
    else:
        # A rank may have no need of an expert and still pass its cut on to one that has.
        collected = [gathering.collect(x, ep) for x in all_gather(local, mine.axis(position))]
        by_cut_then_expert = [experts for experts in collected if experts is not None]
    if not by_cut_then_expert:
        return _empty(batch, dtype, torch.device("meta"))
    return [
        (tensor, values)
        for parameter, cuts in zip(batch, zip(*by_cut_then_expert, strict=True), strict=True)
        for tensor, (_, values) in zip(
            parameter.tensors, to_huggingface(parameter, cuts, arch), strict=True
        )
    ]


def _empty(
    batch: Sequence[ParameterSpec], dtype: torch.dtype, device: torch.device
) -> list[tuple[HfTensorSpec, Tensor]]:
    return [
        (tensor, torch.empty(tensor.shape, dtype=dtype, device=device))
        for parameter in batch
        for tensor in parameter.tensors
    ]
