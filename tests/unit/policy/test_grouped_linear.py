"""All experts' products at once against one product per expert."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.policy.torch_backend.grouped_linear import _Grouped, stack_or_view

OUT, IN = 8, 4  # rows of 16 bytes and more, in fp32


def _case(counts: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), IN, generator=draw, requires_grad=True)
    weights = [torch.randn(OUT, IN, generator=draw, requires_grad=True) for _ in counts]
    return x, torch.tensor(counts).cumsum(0, dtype=torch.int32), weights


def _one_by_one(
    x: Tensor, counts: list[int], weights: list[Tensor], grad: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    x = x.detach().clone().requires_grad_()
    weights = [w.detach().clone().requires_grad_() for w in weights]
    parts = zip(x.split(counts), weights, strict=True)
    out = torch.cat([F.linear(part, weight) for part, weight in parts])
    out.backward(grad)
    none = torch.zeros(OUT, IN)
    to_weights = [none if w.grad is None else w.grad for w in weights]
    assert x.grad is not None
    return out.detach(), x.grad, to_weights


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_one_product_for_all_experts(counts: list[int]) -> None:
    x, ends, weights = _case(counts)
    grad = torch.randn(sum(counts), OUT)
    out, to_x, to_weights = _one_by_one(x, counts, weights, grad)
    found = _Grouped.apply(x, ends, None, *weights)
    found.backward(grad)
    torch.testing.assert_close(found.detach(), out)
    torch.testing.assert_close(x.grad, to_x)
    torch.testing.assert_close([w.grad for w in weights], to_weights)


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_are_added_to_what_main_grad_holds(apart: bool) -> None:
    counts = [3, 0, 2]
    x, ends, weights = _case(counts)
    grad = torch.randn(sum(counts), OUT)
    _, to_x, to_weights = _one_by_one(x, counts, weights, grad)
    buffer = torch.ones(3, OUT, IN, dtype=torch.float64)
    for weight, part in zip(weights, buffer, strict=True):
        weight.main_grad = part.clone() if apart else part  # type: ignore[attr-defined]
    announced: list[Tensor] = []
    held: Any = SimpleNamespace(_parameters_of=lambda name: weights, announce=announced.append)
    for _ in range(2):  # two micro-batches
        _Grouped.apply(x, ends, held).backward(grad)
    assert [id(weight) for weight in announced] == [id(weight) for weight in weights] * 2
    for weight, expected in zip(weights, to_weights, strict=True):
        assert weight.grad is None
        found = weight.main_grad  # type: ignore[attr-defined]
        torch.testing.assert_close(found, 1 + 2 * expected.double(), check_dtype=False)
    torch.testing.assert_close(x.grad, 2 * to_x)


def test_a_view_where_tensors_lie_end_to_end_and_a_copy_elsewhere() -> None:
    whole = torch.randn(3, OUT, IN)
    together = stack_or_view(list(whole))
    assert together.data_ptr() == whole.data_ptr()
    torch.testing.assert_close(together, whole)
    for tensors in (list(whole)[::-1], [w.clone() for w in whole], list(whole)[::2]):
        found = stack_or_view(tensors)
        torch.testing.assert_close(found, torch.stack(tensors))
        assert found.data_ptr() != tensors[0].data_ptr()


def test_neighbours_of_two_storages_are_copied() -> None:
    memory = bytearray(2 * OUT * IN * 4)
    halves = [
        torch.frombuffer(memory, dtype=torch.float32, count=OUT * IN, offset=at).view(OUT, IN)
        for at in (0, len(memory) // 2)
    ]
    assert halves[1].data_ptr() - halves[0].data_ptr() == len(memory) // 2
    halves[1].fill_(1.0)
    torch.testing.assert_close(stack_or_view(halves), torch.stack(halves))
