"""Overlap, flips, and what routers are told to choose."""

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rltrain.parallel.token_layout import PAD, TokenGrid, layout_tokens
from rltrain.routing.agreement import (
    choice_margin,
    flipped_before,
    gate_mass,
    num_shared,
    spread_experts,
)
from rltrain.routing.align import last_rows, router_targets


def distinct(num_rows: int, k: int, num_experts: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_experts, generator=g)[:k] for _ in range(num_rows)])


@given(st.integers(0, 1000), st.integers(1, 4))
def test_num_shared_is_the_size_of_the_intersection(seed: int, k: int) -> None:
    a, b = distinct(10, k, 6, seed), distinct(10, k, 6, seed + 1)
    expected = [len(set(x) & set(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert num_shared(a, b).tolist() == expected
    assert num_shared(a, a.flip(-1)).tolist() == [k] * 10


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([1.0, 1e-30]))
def test_gate_mass_is_the_share_of_the_native_choice(seed: int, k: int, scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    gates = scale * torch.rand(10, 6, generator=g)
    used, native = distinct(10, k, 6, seed), gates.topk(k).indices
    expected = [
        sum(row[e] for e in a) / sum(row[e] for e in b)
        for row, a, b in zip(gates.double().numpy(), used.tolist(), native.tolist(), strict=True)
    ]
    found = gate_mass(gates, used, native)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    assert (found <= 1 + 1e-6).all()
    torch.testing.assert_close(gate_mass(gates, native.flip(-1), native), torch.ones(10))


def test_gate_mass_of_gates_that_are_all_zero_is_a_number() -> None:
    rows = torch.tensor([[0, 1], [0, 1]])
    gates = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert gate_mass(gates, rows, torch.tensor([[1, 2], [2, 1]])).tolist() == [0.0, 0.0]


def test_gate_mass_may_exceed_one_where_limits_chose() -> None:
    gates = torch.tensor([[0.5, 0.3, 0.2]])
    found = gate_mass(gates, torch.tensor([[0]]), torch.tensor([[2]]))
    assert found.tolist() == pytest.approx([2.5])


ROW = st.tuples(st.booleans(), st.booleans(), st.booleans())  # one flag a layer


@given(st.lists(st.lists(ROW, min_size=1, max_size=6), min_size=1, max_size=5), st.booleans())
@example([[(False, False, True), (False, False, False), (False, False, False)]], False)
def test_a_flip_touches_what_reads_it(
    flips: list[list[tuple[bool, bool, bool]]], read_above: bool
) -> None:
    """The row that predicts t in all layers; rows before it in all that a layer above reads."""
    expected = [
        any(first or second or (last and read_above) for first, second, last in seq[:t])
        or (t > 0 and seq[t - 1][2])
        for seq in flips
        for t in range(len(seq))
    ]
    lens = torch.tensor([len(seq) for seq in flips])
    found = flipped_before(
        torch.tensor([row for seq in flips for row in seq]), lens, read_above=read_above
    )
    assert found.tolist() == expected


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 8))
def test_padding_experts_are_distinct_and_spread(rows: int, k: int, more: int) -> None:
    num_experts = k + more
    experts = spread_experts(rows, k, num_experts)
    assert all(len(set(row)) == k for row in experts.tolist())
    load = torch.bincount(experts.flatten(), minlength=num_experts)
    assert int(load.max() - load.min()) <= 1


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
)
def test_router_targets_follow_their_tokens(seq_lens: list[int], tp: int, cp: int) -> None:
    n, layers, k, num_experts = sum(seq_lens), 3, 2, 8
    routes = torch.stack([distinct(n, k, num_experts, layer) for layer in range(layers)], dim=1)
    for grid in (TokenGrid(tp, t, cp, c) for t in range(tp) for c in range(cp)):
        index = layout_tokens(seq_lens, grid).routers
        experts = router_targets(routes.to(torch.uint8), index, num_experts)
        assert experts.dtype == torch.uint8
        for slot, token in enumerate(index.tolist()):
            if token == PAD:
                assert all(len(set(row)) == k for row in experts[slot].tolist())
            else:
                assert experts[slot].tolist() == routes[token].tolist()


def test_a_rank_without_a_sequence_routes_padding() -> None:
    experts = router_targets(torch.zeros(0, 3, 2, dtype=torch.uint8), torch.full((4,), PAD), 8)
    assert experts.tolist() == [[row] * 3 for row in ([0, 1], [2, 3], [4, 5], [6, 7])]


def test_last_rows() -> None:
    assert last_rows(torch.tensor([2, 1, 3])).tolist() == [False, True, True, False, False, True]


# experts of a token, groups, groups of a token, best experts that score a group
LIMITS = [(1, None, None, 2), (3, None, None, 2), (4, 4, 2, 2), (6, 4, 3, 1)]


@given(st.integers(0, 10**6), st.sampled_from(LIMITS))
@example(247, LIMITS[3])
def test_a_choice_stays_while_scores_move_by_less_than_half_the_margin(
    seed: int, limits: tuple[int, int | None, int | None, int]
) -> None:
    """And changes when the two scores, or groups of scores, at its edge move by more."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(5, 16, generator=g)
    margin = choice_margin(scores, *limits)
    assert (margin > 0).all()
    assume((margin > 1e-4).all())  # below, rounding to fp32 takes a part of the 2 % that are left
    chosen = chosen_experts(scores, *limits)
    sign = torch.where(torch.rand(5, 16, generator=g) < 0.5, 1.0, -1.0)
    moved = scores + 0.49 * margin.unsqueeze(1) * sign
    assert chosen_experts(moved, *limits) == chosen
    # Against the choice: what was chosen goes down, the rest goes up, by a little more.
    for row in range(5):
        if not gives_an_expert(chosen[row], scores[row], *limits[1:]):
            continue
        against = torch.ones(16)
        against[list(chosen[row])] = -1.0
        flipped = [
            chosen_experts((scores[row] + x * margin[row])[None], *limits)[0] != chosen[row]
            for x in moves(against, scores[row], *limits[1:])
        ]
        assert any(flipped)


def gives_an_expert(
    chosen: set[int], row: torch.Tensor, groups: int | None, kept: int | None, best_of: int
) -> bool:
    """Whether the last group that is kept has a chosen expert; without one it may be any."""
    if not groups or not kept:
        return True
    size = 16 // groups
    last = row.view(groups, -1).topk(best_of).values.sum(1).topk(kept).indices[-1]
    return any(expert // size == last for expert in chosen)


def moves(
    against: torch.Tensor, row: torch.Tensor, groups: int | None, kept: int | None, best_of: int
) -> list[torch.Tensor]:
    """By 0.51 each: of every expert, and of every pair of a group kept and a group passed over."""
    found = [0.51 * against]
    if groups and kept:
        best = row.view(groups, -1).topk(best_of).values.sum(1).topk(kept).indices.tolist()
        for down in best:
            for up in set(range(groups)) - set(best):
                move = torch.zeros(groups, 16 // groups)
                move[down], move[up] = -0.51, 0.51
                found.append(move.flatten())
        inside = torch.zeros(groups, 16 // groups)
        inside[best] = 1.0
        found.append(0.51 * against * inside.flatten())
    return found


def chosen_experts(
    scores: torch.Tensor, k: int, groups: int | None, kept: int | None, best_of: int
) -> list[set[int]]:
    """From the groups whose ``best_of`` best experts score most, row by row."""
    found = []
    for row in scores.tolist():
        allowed = range(16)
        if groups and kept:
            size = 16 // groups
            of = [sorted(row[i * size : (i + 1) * size])[-best_of:] for i in range(groups)]
            best = sorted(range(groups), key=lambda i: -sum(of[i]))[:kept]
            allowed = [e for e in range(16) if e // size in best]
        found.append(set(sorted(allowed, key=lambda e: -row[e])[:k]))
    return found


def test_who_takes_every_expert_has_no_margin() -> None:
    assert choice_margin(torch.rand(3, 4), 4).tolist() == [float("inf")] * 3
    assert choice_margin(torch.rand(3, 8), 4, 2, 2).isfinite().all()
    assert choice_margin(torch.tensor([[3.0, 1.0, 2.5]]), 2).tolist() == [1.5]
