"""How far a given expert lies below a router's own choice, against a search over moved scores."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.routing.deficits import NUM_BINS, REPLAYED, bins, deficits, upper_edges
from rltrain.routing.expert_groups import score_groups, within_groups
from rltrain.routing.flips import LayerFlips
from rltrain.routing.noise import LEAST_SPREAD, MOST_SPREAD, last_narrow_bin, noise_scale

LIMITS = [(1, None, None), (3, None, None), (16, None, None), (4, 4, 2), (6, 4, 3)]


def choice(scores: Tensor, k: int, groups: int | None, kept: int | None) -> Tensor:
    if groups and kept:
        scores = within_groups(scores, score_groups(scores, groups, 2), kept)
    return scores.topk(k).indices


@given(st.integers(0, 10**6), st.sampled_from(LIMITS), st.sampled_from([1e-4, 1e-2, 1.0]))
def test_what_rounding_moves_is_never_wider_than_twice_the_rounding(
    seed: int, limits: tuple[int, int | None, int | None], size: float
) -> None:
    """Whatever an engine chooses by scores that differ by at most ``size``, groups or not."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(20, 16, generator=draw)
    moved = scores + size * (2 * torch.rand(20, 16, generator=draw) - 1)
    _, groups, kept = limits
    found = deficits(scores, choice(moved, *limits), num_groups=groups, group_topk=kept, best=2)
    limit = bins(torch.tensor(2.001 * size))
    assert (found.bins <= limit).all()
    own = deficits(scores, choice(scores, *limits), num_groups=groups, group_topk=kept, best=2)
    assert (own.bins == 0).all() and (own.runners_up < REPLAYED).all()


@given(st.integers(0, 10**6), st.sampled_from([(1, 8), (2, 8), (8, 32)]))
def test_without_groups_it_is_the_distance_to_the_weakest_chosen(
    seed: int, sizes: tuple[int, int]
) -> None:
    k, num_experts = sizes
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(7, num_experts, generator=draw)
    experts = torch.rand(7, num_experts, generator=draw).topk(k).indices
    found = deficits(scores, experts)
    for row in range(7):
        ranked = scores[row].sort(descending=True)
        for column in range(k):
            distance = (ranked.values[k - 1] - scores[row, experts[row, column]]).clamp_min(0)
            assert int(found.bins[row, column]) == int(bins(distance))
        for rank, value in enumerate(found.runners_up[row].tolist()):
            expert = int(ranked.indices[k + rank])
            assert (value >= REPLAYED) == (expert in experts[row].tolist())
            assert value % REPLAYED == int(bins(ranked.values[k - 1] - ranked.values[k + rank]))


def test_an_expert_of_a_group_that_was_not_chosen_has_its_groups_deficit() -> None:
    scores = torch.tensor(
        [[0.9, 0.8, 0.7, 0.1, 0.65, 0.6, 0.2, 0.1]]
    )  # groups of 2: 1.7 .8 1.25 .3
    limits = {"num_groups": 4, "group_topk": 2, "best": 2}

    def width(*experts: int) -> list[int]:
        return deficits(scores, torch.tensor([experts]), **limits).bins[0].tolist()

    assert width(0, 1) == [0, 0]
    group = int(bins(torch.tensor((1.25 - 0.8) / 2)))
    assert width(0, 2) == [0, group]  # 0.7 would be third of all: its group is what it lacks
    assert width(4, 0) == [int(bins(torch.tensor(0.8) - torch.tensor(0.65))), 0]


def test_sigmoid_gates_are_measured_in_logits() -> None:
    """Where gates saturate, a small difference of gates is a large one of logits."""
    logits = torch.tensor([[6.0, 5.0, 4.0, 0.0]])
    found = deficits(logits.sigmoid(), torch.tensor([[2]]), gates=logits.sigmoid())
    plain = deficits(logits, torch.tensor([[2]]))
    octaves = (int(found.bins) - int(plain.bins)) / 4
    assert abs(octaves) <= 2
    assert int(bins(logits.sigmoid()[0, 0] - logits.sigmoid()[0, 2])) < int(plain.bins) - 20


@given(st.floats(0, 1e4, width=32, allow_subnormal=False))
@example(0.0)
@example(float("inf"))
def test_a_bin_holds_what_lies_below_its_edge(deficit: float) -> None:
    found, edges = int(bins(torch.tensor(deficit))), upper_edges()
    assert found < NUM_BINS and (found == 0) == (deficit == 0)
    assert deficit <= edges[found] * (1 + 1e-6)
    if found > 1:
        assert deficit >= edges[found - 1] * (1 - 1e-6)


def test_what_is_no_number_is_as_wide_as_can_be() -> None:
    assert bins(torch.tensor([torch.nan, torch.inf])).tolist() == [NUM_BINS - 1] * 2


# Noise

SIZES = [(8, 2), (32, 8), (256, 8), (32, 1)]


def step_of(noise: float, wrong: float, num_experts: int, k: int, rows: int = 8000) -> LayerFlips:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, num_experts, generator=draw)
    moved = scores + noise * torch.randn(rows, num_experts, generator=draw) / 2**0.5
    experts = moved.topk(k).indices
    spoiled = torch.rand(rows, generator=draw) < wrong
    other = torch.rand(rows, num_experts, generator=draw).topk(k).indices
    experts = torch.where(spoiled.unsqueeze(1), other, experts)
    found = deficits(scores, experts)
    counts = found.runners_up.flatten().long().bincount(minlength=256)
    return LayerFlips(counts, float(found.spread.sum()), experts.flatten().bincount())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("wrong", [0.0, 0.03, 0.2])
def test_the_scale_is_found_though_rows_are_wrong(
    sizes: tuple[int, int], noise: float, wrong: float
) -> None:
    found = noise_scale(step_of(noise, wrong, *sizes).runners_up)
    assert 0.4 < found / noise < 1.7


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("noise", "wrong"), [(0.0, 0.0), (1e-6, 0.03), (0.0, 1.0), (5.0, 0.0)])
def test_what_is_wide_lies_within_its_bounds(
    sizes: tuple[int, int], noise: float, wrong: float
) -> None:
    """No noise, routes that are all wrong, or an engine of another model: the spread decides."""
    rows = 4000
    found = step_of(noise, wrong, *sizes, rows=rows)
    spread = found.spread / rows
    edge = float(upper_edges()[last_narrow_bin(found, noise_scale(found.runners_up), rows)])
    assert LEAST_SPREAD * spread <= edge <= 1.2 * MOST_SPREAD * spread


def test_few_rows_do_not_measure_noise() -> None:
    few = step_of(0.01, 0.0, 8, 2, rows=5)
    assert noise_scale(few.runners_up) == float("inf")
    assert noise_scale(torch.zeros(256, dtype=torch.int64)) == float("inf")
    empty = LayerFlips(torch.zeros(256, dtype=torch.int64), 0.0, few.uses)
    assert last_narrow_bin(empty, float("inf"), 0) == 1
