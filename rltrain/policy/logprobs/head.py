"""The output head is left out of the model's forward pass, and applied where its result is used.

Megatron's own pass ends with all logits of a micro-batch, which are the largest tensor there is.
`logprobs` needs a block of them at a time, so within `hidden_states` a chunk hands on what its head
would read. Parameters, checkpoints and Megatron's all-reduce of tied embeddings see the layer where
it always was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn


@contextmanager
def hidden_states(chunk: nn.Module) -> Iterator[None]:
    """While open, a chunk that would yield logits yields the head's input.  # [1, S / tp, H]

    A head that is more than a product with its weight, like a value head, runs as ever.
    """
    if head_weight(chunk) is None:
        yield
        return
    head = _unwrapped(chunk).output_layer
    head.forward = _hand_on  # covers the class's own
    try:
        yield
    finally:
        del head.forward


def head_weight(chunk: nn.Module) -> Tensor | None:
    """The weight of a head that can be left out, None if the chunk has no such head.

    # [V / tp, H]
    """
    model = _unwrapped(chunk)
    head: Any = getattr(model, "output_layer", None)
    if type(head) is not ColumnParallelLinear or head.bias is not None:
        return None
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else head.weight
    return weight


def head_input(output: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """What every rank of a tensor-parallel group multiplies.  # [1, S / tp, H] -> [S, H]"""
    hidden = output.squeeze(0)
    if group is None:
        return hidden
    # Each rank's gradient is that of its slice of the vocabulary: they are summed and cut again.
    return gather_from_sequence_parallel_region(hidden, group=group)


def in_fp32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: let the output head multiply in fp32, where it runs within the model.

    ``weight`` is the embedding's where it is tied.
    """
    if "forward" in vars(module):
        return None
    weight = kwargs.get("weight")
    weight = module.weight if weight is None else weight
    return (args[0].float(), *args[1:]), {**kwargs, "weight": weight.float()}


def _hand_on(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    return hidden, None


def _unwrapped(chunk: nn.Module) -> Any:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
