"""Leaves the output head out of the model's forward pass, so that `logprobs` can apply it.

Megatron's forward pass ends with all logits of a micro-batch, which are the largest tensor of a
pass. `logprobs` needs one block of them at a time. Within `hidden_states` the last chunk returns
the input of its head instead. The head stays in the model, so parameters, checkpoints and
Megatron's all-reduce of tied embeddings do not change.
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
    """Within the context, the chunk returns its head's input, not logits.  # [1, S / tp, H]

    A head that is more than a product with its weight, like a value head, still runs.
    """
    if head_weight(chunk) is None:
        yield
        return
    head = _unwrapped(chunk).output_layer
    head.forward = _identity  # hides the method of the class
    try:
        yield
    finally:
        del head.forward


def head_weight(chunk: nn.Module) -> Tensor | None:
    """The weight of a head that can be left out; None if the chunk has no such head.

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
    """The rows of all tensor-parallel ranks, which each rank's head reads.

    # [1, S / tp, H] -> [S, H]
    """
    hidden = output.squeeze(0)
    if group is None:
        return hidden
    # Each rank has the gradient of its slice of the vocabulary. Backward sums them, then splits.
    return gather_from_sequence_parallel_region(hidden, group=group)


def in_fp32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: an output head that runs within the model multiplies in fp32.

    Tied embeddings are passed as ``weight``.
    """
    if "forward" in vars(module):  # left out by `hidden_states`
        return None
    weight = kwargs.get("weight")
    weight = module.weight if weight is None else weight
    return (args[0].float(), *args[1:]), {**kwargs, "weight": weight.float()}


def _identity(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    return hidden, None


def _unwrapped(chunk: nn.Module) -> Any:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
