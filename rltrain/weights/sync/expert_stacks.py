"""All experts of a layer are passed to vLLM's loader in one call.

vLLM needs about 0.1 ms of Python per expert weight, whatever its size, so a sync of 48 layers with
128 experts would take seconds. Its loader also accepts all experts of a layer in one tensor. The
weights of a layer's experts are held here until the last one has arrived, then loaded together.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor

STACKED = ("w13_weight", "w2_weight")
"""Names of the parameters of vLLM's routed experts, ``[E, out, in]`` each."""
LOADER = "RoutedExperts.weight_loader"
TAKEN = ["param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success"]
"""The loader that accepts stacks, and its arguments. Other loaders are not changed."""


def stack_experts(model: torch.nn.Module) -> None:
    """Make the loaders of a model stack its experts; call it when a layerwise reload begins."""
    unstack_experts(model)
    for parameter, local_number in _of_experts(model):
        loader = parameter.weight_loader
        if parameter.dim() == 3 and _takes_stacks(loader):
            parameter.weight_loader = _stacking(loader, local_number, len(parameter))


def unstack_experts(model: torch.nn.Module) -> None:
    """Undo `stack_experts`: vLLM keeps the loaders from one reload to the next."""
    for parameter, _ in _of_experts(model):
        while hasattr(parameter.weight_loader, "stacks_experts"):
            parameter.weight_loader = parameter.weight_loader.__wrapped__


def _of_experts(model: torch.nn.Module) -> Iterator[tuple[Any, Callable[[int], int]]]:
    """Parameters of routed experts, each with a map from global to local expert number."""
    for module in model.modules():
        local_number: Any = getattr(module, "_map_global_expert_id_to_local_expert_id", None)
        for name in STACKED if local_number is not None else ():
            parameter: Any = getattr(module, name, None)
            if hasattr(parameter, "weight_loader"):
                yield parameter, local_number


def _takes_stacks(loader: Callable[..., Any]) -> bool:
    """Whether it is the known loader; layers that override it have another."""
    is_known = getattr(unwrap(loader), "__qualname__", None) == LOADER
    return is_known and [*signature(loader).parameters] == TAKEN


def _stacking(
    loader: Callable[..., Any], local_number: Callable[[int], int], count: int
) -> Callable[..., Any]:
    """A loader that collects ``count`` experts of a matrix, then calls ``loader`` once.

    Args:
        local_number: an expert's number on this rank by its number in the model; -1: not here
        count: number of experts on this rank
    """
    waiting: dict[str, dict[int, Tensor]] = {}  # by matrix, by the expert's local number

    # `wraps` keeps the name and sets ``__wrapped__``: with these vLLM finds the loader that it
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
