"""Experts go to their loader together."""

from inspect import signature
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rltrain.weights.sync.expert_stacks import LOADER, TAKEN, stack_experts, unstack_experts

EXPERTS, FIRST, LOCAL = 8, 2, 4


class RoutedExperts(nn.Module):
    """As vLLM's layer of this name, with experts 2 to 5 of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.w13_weight = nn.Parameter(torch.zeros(LOCAL, 6, 5))
        self.w2_weight = nn.Parameter(torch.zeros(LOCAL, 5, 3))
        for parameter in (self.w13_weight, self.w2_weight):
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return expert_id - FIRST if FIRST <= expert_id < FIRST + LOCAL else -1

    def weight_loader(
        self,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        number = self._map_global_expert_id_to_local_expert_id(expert_id)
        if number < 0:
            return False
        rows = {"w1": slice(0, 3), "w3": slice(3, 6), "w2": slice(None)}[shard_id]
        whole = loaded_weight.dim() == 3
        (param.data if whole else param.data[number])[..., rows, :].copy_(loaded_weight)
        self.calls.append((shard_id, loaded_weight.dim()))
        return True


def weights(order: list[int]) -> list[tuple[str, int, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1": (3, 5), "w3": (3, 5), "w2": (5, 3)}
    found = [
        (matrix, expert, torch.randn(shape, generator=draw))
        for expert in range(EXPERTS)
        for matrix, shape in shapes.items()
    ]
    return [found[i] for i in order]


def load(layer: RoutedExperts, order: list[int]) -> list[bool]:
    answers = []
    for matrix, expert, weight in weights(order):
        parameter: Any = layer.w2_weight if matrix == "w2" else layer.w13_weight
        answers.append(
            parameter.weight_loader(
                parameter, weight, "name", shard_id=matrix, expert_id=expert, return_success=True
            )
        )
    return answers


@given(st.permutations(range(3 * EXPERTS)))
def test_one_call_a_matrix_whatever_the_order(order: list[int]) -> None:
    one_by_one, together = RoutedExperts(), RoutedExperts()
    stack_experts(together)
    assert load(one_by_one, order) == load(together, order)
    assert sorted(together.calls) == [("w1", 3), ("w2", 3), ("w3", 3)]
    assert len(one_by_one.calls) == 3 * LOCAL
    for name, parameter in one_by_one.named_parameters():
        assert torch.equal(parameter, together.get_parameter(name))


def test_a_missing_expert_is_loaded_by_nobody() -> None:
    layer = RoutedExperts()
    stack_experts(layer)
    load(layer, [i for i in range(3 * EXPERTS) if i != 3 * FIRST])  # w1 of the first local expert
    assert sorted(layer.calls) == [("w2", 3), ("w3", 3)]


def test_what_waited_is_forgotten_when_the_next_reload_begins() -> None:
    layer = RoutedExperts()
    stack_experts(layer)
    load(layer, [3 * FIRST])
    for _ in range(3):
        stack_experts(layer)
    loader: Any = layer.w2_weight.weight_loader  # type: ignore[attr-defined]
    assert loader.__wrapped__ == layer.weight_loader, "a wrapper around a wrapper, one a sync"
    load(layer, [i for i in range(3 * EXPERTS) if i != 3 * FIRST])
    assert sorted(layer.calls) == [("w2", 3), ("w3", 3)]
    unstack_experts(layer)
    assert layer.w2_weight.weight_loader == layer.weight_loader  # type: ignore[attr-defined]


class Overridden(RoutedExperts):
    def weight_loader(self, *args: Any, **kwargs: Any) -> bool:
        return super().weight_loader(*args, **kwargs)


def test_stacks_and_loaders_of_other_kinds_pass() -> None:
    other = Overridden()
    stack_experts(other)
    assert other.w2_weight.weight_loader == other.weight_loader  # type: ignore[attr-defined]
    layer = RoutedExperts()
    stack_experts(layer)
    parameter: Any = layer.w13_weight
    assert parameter.weight_loader(parameter, torch.ones(LOCAL, 3, 5), "name", "w3", FIRST, True)
    assert layer.calls == [("w3", 3)]


def test_vllms_loader_takes_what_is_expected() -> None:
    """Else engines would load one by one again, in a tenth of the speed."""
    from vllm.model_executor.layers.fused_moe import routed_experts

    theirs = routed_experts.RoutedExperts
    assert theirs.weight_loader.__qualname__ == LOADER
    assert [*signature(theirs.weight_loader).parameters] == ["self", *TAKEN]
    assert hasattr(theirs, "_map_global_expert_id_to_local_expert_id")
