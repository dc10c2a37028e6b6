"""Which replayed experts are kept, against the rule written out in loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.routing.gate_admission import admitted


def written_out(
    gates: list[float], replayed: list[int], native: list[int], ratio: float
) -> set[int]:
    weakest = min(gates[expert] for expert in native)
    kept = [expert for expert in replayed if gates[expert] >= ratio * weakest]
    best_first = sorted(native, key=lambda expert: -gates[expert])
    others = [expert for expert in best_first if expert not in kept]
    return {*kept, *others[: len(replayed) - len(kept)]}


@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(0.001, 1.0))
def test_it_is_the_rule(seed: int, k: int, ratio: float) -> None:
    gates, replayed, native = draw(seed, k)
    found = admitted(gates, replayed, native, ratio)
    for row in range(len(gates)):
        expected = written_out(
            gates[row].tolist(), replayed[row].tolist(), native[row].tolist(), ratio
        )
        assert set(found[row].tolist()) == expected
        assert len(expected) == k
        if expected == set(replayed[row].tolist()):
            assert found[row].tolist() == replayed[row].tolist()  # in their order


def test_a_ratio_of_one_is_native_routing_and_a_tiny_one_is_replay() -> None:
    gates, replayed, native = draw(3, 2)
    assert torch.equal(admitted(gates, replayed, native, 1.0).sort().values, native.sort().values)
    assert torch.equal(admitted(gates, replayed, native, 1e-9), replayed)


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_a_native_expert_is_always_kept(ratio: float) -> None:
    """Also where a bias, which is no part of a gate, made the choice."""
    gates = torch.tensor([[0.5, 0.01, 0.3, 0.19]])
    native = torch.tensor([[1, 2]])  # the bias chose 1
    assert admitted(gates, torch.tensor([[1, 3]]), native, ratio).tolist() == [[1, 3]]


def draw(seed: int, k: int, rows: int = 20, experts: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gates = torch.rand(rows, experts, generator=generator).softmax(1)
    replayed = torch.rand(rows, experts, generator=generator).topk(k).indices
    return gates, replayed, gates.topk(k).indices
