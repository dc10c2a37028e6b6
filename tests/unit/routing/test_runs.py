"""Runs, and the number of different tokens that tells a stale row from a router's choice."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.routing.runs import repeated_rows, runs, stale_runs, stale_tokens


@given(st.lists(st.booleans(), max_size=12))
@example([True])
@example([])
def test_runs_cover_what_is_true(flags: list[bool]) -> None:
    found = runs(np.array(flags, dtype=bool))
    assert [n for start, end in found for n in range(start, end)] == list(np.flatnonzero(flags))
    assert len(found) == sum(key for key, _ in groupby(flags))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=10))
@example([(0, 0), (0, 1), (0, 1), (1, 1)])
def test_a_row_repeats_when_every_layer_does(rows: list[tuple[int, int]]) -> None:
    ids = np.array(rows)[:, :, None]
    expected, start = [], 0
    for _, group in groupby(rows):
        size = len(list(group))
        expected += [(start, start + size)] if size > 1 else []
        start += size
    assert repeated_rows(ids) == expected


@pytest.mark.parametrize(
    ("layers", "experts", "k", "tokens"),
    [
        (48, 128, 8, 2),
        (32, 8, 2, 2),
        (8, 8, 2, 13),
        (2, 8, 2, 14),
        (1, 8, 2, 26),
        (1, 8, 1, 41),
        (1, 2, 1, 121),
    ],
)
def test_fewer_choices_need_more_tokens(layers: int, experts: int, k: int, tokens: int) -> None:
    assert stale_tokens(layers, experts, k) == tokens


def test_a_run_is_stale_from_that_many_different_tokens_on() -> None:
    ids = np.zeros((40, 2, 2), dtype=np.uint8)
    ids[:, :, 1] = np.arange(40)[:, None] % 5 + 1
    ids[20:34] = ids[20]
    tokens = np.arange(40)
    assert stale_runs(ids, tokens, 8) == [(20, 34)]
    tokens[25] = tokens[24]
    assert stale_runs(ids, tokens, 8) == []


def test_without_a_choice_every_row_is_equal() -> None:
    assert stale_runs(np.zeros((999, 1, 1), dtype=np.uint8), np.arange(999), 1) == []


@pytest.mark.parametrize(("layers", "experts", "k"), [(1, 4, 1), (1, 8, 1), (1, 8, 2), (2, 8, 2)])
def test_honest_uneven_routing_is_not_stale(layers: int, experts: int, k: int) -> None:
    """Independent choices in which the first expert has three fifths of the load."""
    rng = np.random.default_rng(0)
    chance = np.full(experts, 0.4 / (experts - 1))
    chance[0] = 0.6
    keys = np.log(chance) + rng.gumbel(size=(200_000, layers, experts))
    ids = (-keys).argsort(axis=-1)[..., :k].astype(np.uint8)
    assert stale_runs(ids, np.arange(len(ids)), experts) == []
