"""Two routes files side by side: what differs, where first, and what a near-tie explains."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.verification.routes_difference import compare_routes
from rltrain.verification.routes_file import Routes

LENS, LAYERS, E, K = (5, 1, 7), (1, 2, 5), 8, 2
N = sum(LENS)


def some_routes(seed: int = 0, **fields: Any) -> Routes:
    g = torch.Generator().manual_seed(seed)
    values: dict[str, Any] = {
        "ids": torch.rand(N, len(LAYERS), E, generator=g).topk(K).indices.to(torch.uint8),
        "route_mask": torch.ones(N, dtype=torch.bool),
        "seq_lens": torch.tensor(LENS),
        "tokens": torch.arange(N) + 100,
        "layers": LAYERS,
        "num_experts": E,
        "weight_version": 0,
        "producer": "test",
        "margins": torch.ones(N, len(LAYERS)),
    }
    return Routes(**values | fields)


def changed(routes: Routes, *cells: tuple[int, int]) -> Routes:
    """Another expert in place of the first, at these (token, layer number) cells."""
    ids = routes.ids.clone()
    for token, n in cells:
        old = set(ids[token, n].tolist())
        ids[token, n, 0] = min(set(range(E)) - old)
    return replace(routes, ids=ids)


def test_equal_routes_in_another_order() -> None:
    routes = some_routes()
    found = compare_routes(replace(routes, ids=routes.ids.flip(-1)), routes, 0.5)
    assert (found.num_rows, found.num_unmatched, found.unexplained, found.firsts) == (N, 0, 0, ())
    assert [layer.overlap for layer in found.layers] == [1.0, 1.0, 1.0]


def test_a_changed_expert_is_named() -> None:
    routes = some_routes()
    other = changed(routes, (8, 1))
    found = compare_routes(other, routes, 0.5)
    [first] = found.firsts
    assert (first.sample, first.row, first.layer, first.token) == (2, 2, 2, 108)
    assert first.actual == tuple(other.ids[8, 1].tolist())
    assert first.expected == tuple(routes.ids[8, 1].tolist())
    assert (first.margin, first.is_near_tie) == (1.0, False)
    assert [(at.layer, at.differing, at.unexplained) for at in found.layers] == [
        (1, 0, 0),
        (2, 1, 1),
        (5, 0, 0),
    ]
    assert found.layers[1].overlap == pytest.approx(1 - 1 / (N * K))


def test_a_near_tie_explains_itself_and_what_reads_it() -> None:
    """Token 7 flips in the first layer; later and higher differences may follow, others not."""
    margins = torch.ones(N, 3)
    margins[7, 0] = 0.01
    routes = some_routes(margins=margins)
    follows = [(7, 1), (7, 2), (9, 1)]
    assert compare_routes(changed(routes, (7, 0), *follows), routes, 0.01).unexplained == 0
    assert compare_routes(changed(routes, (7, 0), *follows), routes, 0.009).unexplained == 1
    for own_cause in ((6, 0), (6, 1), (9, 0), (0, 2)):
        found = compare_routes(changed(routes, (7, 0), own_cause), routes, 0.01)
        assert found.unexplained == 1, own_cause


def test_margins_of_either_side_and_of_none() -> None:
    tie = torch.zeros(N, 3)
    for mine, theirs, left in (
        (tie, None, 0),
        (None, tie, 0),
        (tie, tie + 1, 0),
        (tie + 1, None, 1),
        (None, None, 1),
    ):
        routes = some_routes(margins=theirs)
        other = replace(changed(routes, (3, 0)), margins=mine)
        found = compare_routes(other, routes, 0.5)
        assert found.unexplained == left
        assert (found.firsts[0].margin is None) == (mine is None and theirs is None)


def test_rows_of_one_side_alone_are_counted_and_not_compared() -> None:
    mask = torch.ones(N, dtype=torch.bool)
    mask[8] = False
    routes = some_routes()
    found = compare_routes(replace(changed(routes, (8, 1)), route_mask=mask), routes, 0.5)
    assert (found.num_rows, found.num_unmatched, found.unexplained, found.firsts) == (
        N - 1,
        1,
        0,
        (),
    )
    nothing = torch.zeros(N, dtype=torch.bool)
    with pytest.raises(ValueError, match="nothing to compare"):
        compare_routes(replace(routes, route_mask=nothing), routes, 0.5)


def test_shifted_rows_differ_at_about_chance() -> None:
    routes = some_routes()
    shifted = replace(routes, ids=routes.ids.roll(1, 0))
    found = compare_routes(shifted, routes, 0.5)
    assert all(at.overlap < 0.5 for at in found.layers)
    assert found.layers[0].unexplained == found.layers[0].differing > N / 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": torch.arange(N)}, "different tokens"),
        ({"seq_lens": torch.tensor([1, 5, 7])}, "different tokens"),
        ({"layers": (1, 2, 4)}, "different models"),
        ({"num_experts": 9}, "different models"),
    ],
)
def test_what_cannot_be_compared(fields: dict[str, Any], message: str) -> None:
    routes = some_routes()
    with pytest.raises(ValueError, match=message):
        compare_routes(replace(routes, **fields), routes, 0.5)


CELLS = st.sets(st.tuples(st.integers(0, N - 1), st.integers(0, 2)))


@given(CELLS, CELLS)
@example({(4, 0), (6, 1)}, set())  # across a boundary of samples nothing follows
@example({(0, 0), (0, 1)}, {(0, 1)})
def test_unexplained_by_the_definition(cells: set[tuple[int, int]], ties: set[tuple[int, int]]):
    margins = torch.ones(N, 3)
    for cell in ties:
        margins[cell] = 0.0
    routes = some_routes(margins=margins)
    sample = torch.arange(len(LENS)).repeat_interleave(torch.tensor(LENS)).tolist()
    expected = [
        (t, n)
        for t, n in cells - ties
        if not any(sample[u] == sample[t] and u <= t and m < n for u, m in cells)
    ]
    found = compare_routes(changed(routes, *cells), routes, 0.5)
    assert found.unexplained == len(expected)
    assert [at.differing for at in found.layers] == [
        sum(c[1] == n for c in cells) for n in range(3)
    ]
    firsts = {(f.sample, f.row, f.layer) for f in found.firsts}
    assert len(firsts) == len({sample[t] for t, _ in cells})
