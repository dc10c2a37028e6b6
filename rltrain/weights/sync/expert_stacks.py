"""Experts reach vLLM's loader all at once, where a checkpoint has them one by one.

vLLM loads a weight of one expert in a tenth of a millisecond of Python, whatever its size: a model
of 48 layers with 128 experts would take seconds to sync. Its loader also takes all experts of a
layer in one tensor. Here the weights of a layer's experts wait until the last of them is there, and
then go to it together.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor

STACKED = ("w13_weight", "w2_weight")
"""What vLLM's layers of routed experts call their parameters.  # [E, out, in] each"""
LOADER = "RoutedExperts.weight_loader"
TAKEN = ["param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success"]
"""The loader that takes stacks, and its arguments. Any other is left alone."""


def stack_experts(model: torch.nn.Module) -> None:
    """Change the loaders of a model whose layerwise reload begins."""
    unstack_experts(model)
    for parameter, local_number in _of_experts(model):
        loader = parameter.weight_loader
        if parameter.dim() == 3 and _takes_stacks(loader):
            parameter.weight_loader = _stacking(loader, local_number, len(parameter))


def unstack_experts(model: torch.nn.Module) -> None:
    """Let a reload that begins load one by one again: vLLM keeps loaders from one to the next."""
    for parameter, _ in _of_experts(model):
        while hasattr(parameter.weight_loader, "stacks_experts"):
            parameter.weight_loader = parameter.weight_loader.__wrapped__


def _of_experts(model: torch.nn.Module) -> Iterator[tuple[Any, Callable[[int], int]]]:
    """Parameters, and what tells an expert's number on this rank."""
    for module in model.modules():
        local_number: Any = getattr(module, "_map_global_expert_id_to_local_expert_id", None)
        for name in STACKED if local_number is not None else ():
            parameter: Any = getattr(module, name, None)
            if hasattr(parameter, "weight_loader"):
                yield parameter, local_number


def _takes_stacks(loader: Callable[..., Any]) -> bool:
    """Not so those of layers that override it."""
    is_known = getattr(unwrap(loader), "__qualname__", None) == LOADER
    return is_known and [*signature(loader).parameters] == TAKEN


def _stacking(
    loader: Callable[..., Any], local_number: Callable[[int], int], count: int
) -> Callable[..., Any]:
    """``loader``, called once a matrix with what it was to be called with ``count`` times.

    Args:
        local_number: of an expert by its number in the model; -1: it is another rank's
        count: of this rank's experts
    """
    waiting: dict[str, dict[int, Tensor]] = {}  # by matrix, by the expert's local number

    # Under its own name and with ``__wrapped__``: by these vLLM finds its way to the loader that it
    # wrapped itself, when a layer is complete.
    @wraps(loader)
    def stacking(
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        number = local_number(expert_id)
        if number < 0 or loaded_weight.dim() != 2:
            return loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        arrived = waiting.setdefault(shard_id, {})
        arrived[number] = loaded_weight
        if len(arrived) < count:
            return True if return_success else None
        del waiting[shard_id]
        stack = torch.stack([arrived[i] for i in range(count)])
        return loader(param, stack, weight_name, shard_id, expert_id, return_success)

    stacking.stacks_experts = True  # type: ignore[attr-defined]
    return stacking
