"""Malformed routes never get past the boundary, and the error says where they are."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config.routing import Fallback
from rltrain.routing.codec import RouteIds
from rltrain.routing.integrity import CHANCE_TOKENS, CheckedRoutes, RouteShape, check_routes

SHAPE = RouteShape(num_layers=4, moe_layers=(1, 3), num_experts=8, experts_per_token=3)
SAMPLES = ["prompt a sample 0", "prompt a sample 1", "prompt b sample 0"]
NUM_TOKENS = [5, 2, 9]


def well_formed(seed: int = 0, shape: RouteShape = SHAPE) -> list[RouteIds]:
    rng = np.random.default_rng(seed)
    routes = []
    for tokens in NUM_TOKENS:
        scores = rng.random((tokens - 1, shape.num_layers, shape.num_experts))
        ids = scores.argsort(axis=-1)[..., : shape.experts_per_token].astype(np.uint8)
        ids[:, [n for n in range(shape.num_layers) if n not in shape.moe_layers]] = 0
        routes.append(ids)
    return routes


def check(
    routes: list[RouteIds | None], shape: RouteShape = SHAPE, fallback: Fallback = "error"
) -> list[CheckedRoutes]:
    tokens = [list(range(n)) for n in NUM_TOKENS]
    return check_routes(routes, tokens, shape, SAMPLES, "vLLM 0.30.0", fallback)


@given(st.integers(0, 2**32), st.sampled_from([np.uint8, np.uint16, np.int32]))
def test_layers_without_a_router_are_dropped_and_the_rest_is_unchanged(
    seed: int, dtype: type[np.integer]
) -> None:
    routes = [array.astype(dtype) for array in well_formed(seed)]
    for given_, kept in zip(routes, check(list(routes)), strict=True):
        assert np.array_equal(kept.ids, given_[:, [1, 3]])
        assert kept.missing == kept.faults == ()


def test_nothing_to_check() -> None:
    assert check_routes([], [], SHAPE, [], "vLLM") == []


@pytest.mark.parametrize("sample", range(3))
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: a[:-1], "tokens - 1"),
        (lambda a: np.concatenate([a, a[:1]]), "tokens - 1"),
        (lambda a: a[:, :-1], "layers"),
        (lambda a: a[:, [1, 3]], "layers"),
        (lambda a: a[..., :-1], "experts per token"),
        (lambda a: np.concatenate([a, a[..., :1]], axis=-1), "experts per token"),
        (lambda a: a.astype(np.float32), "expected integer routes"),
        (lambda a: a.astype(bool), "expected integer routes"),
        (lambda a: a.tolist(), "found list"),
        (lambda a: None, "found none"),
    ],
)
def test_wrong_shapes_are_refused(
    sample: int, spoil: Callable[[RouteIds], RouteIds | None], message: str
) -> None:
    routes: list[RouteIds | None] = list(well_formed())
    spoiled = routes[sample]
    assert spoiled is not None
    routes[sample] = spoil(spoiled)
    with pytest.raises(ValueError, match=message) as error:
        check(routes)
    assert SAMPLES[sample] in str(error.value) and "vLLM 0.30.0" in str(error.value)


@given(st.data())
def test_one_bad_entry_is_found_and_named(data: st.DataObject) -> None:
    routes = [array.astype(np.int32) for array in well_formed(data.draw(st.integers(0, 9)))]
    sample = data.draw(st.integers(0, 2))
    row = data.draw(st.integers(0, NUM_TOKENS[sample] - 2))
    layer = data.draw(st.sampled_from(SHAPE.moe_layers))
    column = data.draw(st.integers(0, 2))
    other = routes[sample][row, layer, (column + data.draw(st.integers(1, 2))) % 3]
    routes[sample][row, layer, column] = data.draw(st.sampled_from([-1, 8, 255, 65535, other]))
    where = f"vLLM 0.30.0, {SAMPLES[sample]}, row {row}, layer {layer}: "
    with pytest.raises(ValueError, match=re.escape(where)):
        check(list(routes))


@pytest.mark.parametrize("layer", SHAPE.moe_layers)
def test_a_layer_that_was_not_captured_is_named(layer: int) -> None:
    routes = well_formed()
    for array in routes:
        array[:, layer] = 0
    with pytest.raises(ValueError, match=f"layer {layer}: every row of this layer is zero"):
        check(list(routes))


# What may fall back

ALL = ((0, 8),)


def bad_row(array: RouteIds, value: int, *rows: int) -> RouteIds:
    array = array.astype(np.int64)
    array[list(rows), 3, 0] = value
    return array


def zero_layer(array: RouteIds) -> RouteIds:
    array[:, 3] = 0
    return array


def zero_rows(array: RouteIds, *rows: int) -> RouteIds:
    array[list(rows)] = 0
    return array


def twice(array: RouteIds, row: int) -> RouteIds:
    array[row, 1, 2] = array[row, 1, 0]
    return array


@pytest.mark.parametrize(
    ("spoil", "missing"),
    [
        (lambda a: None, ALL),
        (lambda a: a[:3], ((3, 8),)),  # a prefix is right
        (lambda a: a[:0], ALL),
        (lambda a: np.concatenate([a, a[:1]]), ALL),
        (lambda a: a[:, :-1], ALL),
        (lambda a: a[:, [0, 1, 2, 3, 3]], ALL),
        (lambda a: a[..., :-1], ALL),
        (lambda a: np.concatenate([a, a[..., :1]], axis=-1), ALL),
        (lambda a: a.astype(np.float32), ALL),
        (lambda a: a.astype(bool), ALL),
        (lambda a: a.tolist(), ALL),
        (lambda a: a[0], ALL),
        (lambda a: np.array(1), ALL),
        (lambda a: bad_row(a, 8, 0, 4, 5), ((0, 1), (4, 6))),
        (lambda a: bad_row(a, -1, 7), ((7, 8),)),
        (lambda a: bad_row(a, 2**40, 2), ((2, 3),)),
        (lambda a: bad_row(a, 256 + 3, 2), ((2, 3),)),  # 3 when cut to uint8
        (lambda a: twice(a, 6), ((6, 7),)),
        (lambda a: zero_rows(a, 0, 1, 2), ((0, 3),)),  # a prompt
        (lambda a: zero_rows(a, 1, 3, 5, 7), ((1, 2), (3, 4), (5, 6), (7, 8))),  # a rank's share
        (zero_layer, ALL),
        (lambda a: bad_row(a, 8, 1)[:6], ((1, 2), (6, 8))),
    ],
)
def test_what_cannot_be_used_is_missing_and_the_rest_is_kept(
    spoil: Callable[[RouteIds], RouteIds | None], missing: tuple[tuple[int, int], ...]
) -> None:
    given_ = well_formed()
    routes: list[RouteIds | None] = [*well_formed()[:2], spoil(well_formed()[2])]
    with pytest.raises(ValueError, match=r"vLLM 0\.30\.0, prompt b sample 0"):
        check(list(routes))
    found = check(routes, fallback="live")
    assert [sample.missing for sample in found] == [(), (), missing]
    assert not found[0].faults and all(SAMPLES[2] in fault for fault in found[2].faults)
    assert found[2].ids.shape == (8, 2, 3)
    lost = {row for start, end in missing for row in range(start, end)}
    for row, (experts, true) in enumerate(zip(found[2].ids, given_[2][:, [1, 3]], strict=True)):
        assert all(
            len(set(layer)) == 3 and set(layer) <= set(range(8)) for layer in experts.tolist()
        )
        assert row in lost or np.array_equal(experts, true)


def test_a_prefix_of_zeros_is_not_captured_either() -> None:
    routes = well_formed()
    found = check([*routes[:2], zero_layer(routes[2])[:5]], fallback="drop")
    assert found[2].missing == ALL


# Stale rows

LONG = RouteShape(num_layers=3, moe_layers=(1, 2), num_experts=8, experts_per_token=2)


def long_routes(rows: int) -> RouteIds:
    scores = np.random.default_rng(1).random((rows, 3, 8))
    return scores.argsort(axis=-1)[..., :2].astype(np.uint8)


def check_long(routes: RouteIds, tokens: list[int], fallback: Fallback = "live") -> CheckedRoutes:
    return check_routes([routes], [tokens], LONG, ["s"], "vLLM", fallback)[0]


def test_a_stale_row_is_found_where_it_was_repeated() -> None:
    """sglang#36404: one row, 67 times, at the boundary of a chunked prefill."""
    routes = long_routes(200)
    routes[100:167] = routes[30]
    assert check_long(routes, list(range(201))).missing == ((100, 167),)
    with pytest.raises(ValueError, match="s, rows 100 to 166: every layer repeats"):
        check_long(routes, list(range(201)), "error")


WIDE = RouteShape(num_layers=32, moe_layers=tuple(range(32)), num_experts=8, experts_per_token=2)


@pytest.mark.parametrize("boundary", [1, 100, 199])
def test_a_boundary_row_that_stands_twice_is_found_though_the_count_is_right(boundary: int) -> None:
    """Two parts of a sample were joined: the second repeats the first's last row, and for that the
    sample's last row is lost."""
    scores = np.random.default_rng(2).random((200, 32, 8))
    true = scores.argsort(axis=-1)[..., :2].astype(np.uint8)
    tokens = np.random.default_rng(3).integers(0, 50, 201)
    tokens[boundary] = tokens[boundary - 1] + 1
    joined = np.concatenate([true[:boundary], true[boundary - 1 : -1]])
    assert joined.shape == true.shape

    def check(routes: RouteIds, tokens: list[int], fallback: Fallback) -> CheckedRoutes:
        return check_routes([routes], [tokens], WIDE, ["s"], "vLLM", fallback)[0]

    where = f"s, rows {boundary - 1} to {boundary}: every layer repeats"
    with pytest.raises(ValueError, match=where):
        check(joined, tokens.tolist(), "error")
    assert check(joined, tokens.tolist(), "live").missing == ((boundary - 1, 200),)
    assert check(true, tokens.tolist(), "live").missing == ()
    tokens[boundary] = tokens[boundary - 1]  # an equal token may repeat its route
    assert check(joined, tokens.tolist(), "live").missing == ()


@pytest.mark.parametrize("tokens", [[7] * 201, [7, 8] * 100 + [7], list(range(13)) * 15 + [0] * 6])
def test_few_different_tokens_may_honestly_repeat_a_route(tokens: list[int]) -> None:
    routes = np.repeat(long_routes(1), 200, axis=0)
    assert check_long(routes, tokens).missing == ()


def test_a_layer_that_repeats_alone_may_be_a_collapsed_router() -> None:
    routes = long_routes(200)
    routes[:, 1] = routes[0, 1]
    assert check_long(routes, list(range(201))).missing == ()
    routes[:, 1], routes[:, 2] = long_routes(200)[:, 1], routes[0, 2]
    assert check_long(routes, list(range(201))).missing == ()


# Top-1 models

TOP_1 = RouteShape(num_layers=2, moe_layers=(0, 1), num_experts=8, experts_per_token=1)


def zero_in_layer_1(rows: int) -> RouteIds:
    routes = np.random.default_rng(rows).integers(0, 8, (rows, 2, 1), dtype=np.uint8)
    routes[:, 1] = 0
    return routes


def check_top_1(
    rows: list[int], *, more: tuple[RouteIds, ...] = (), each: int = 10**6
) -> list[Any]:
    """Of samples of all-zero rows in layer 1, ``each`` how many different tokens one may have."""
    routes = [*map(zero_in_layer_1, rows), *more]
    tokens = [[i % each + 1000 * s for i in range(len(r) + 1)] for s, r in enumerate(routes)]
    names = [f"s{n}" for n in range(len(routes))]
    return [r.missing for r in check_routes(routes, tokens, TOP_1, names, "vLLM", "live")]


def test_a_top_1_model_may_choose_expert_0_for_a_while_but_not_for_ever() -> None:
    n = CHANCE_TOKENS
    assert check_top_1([n - 1]) == [()]
    assert check_top_1([n]) == [((0, n),)]
    assert check_top_1([n], each=n - 1) == [()]
    with pytest.raises(ValueError, match="s, layer 1: every row of this layer is zero"):
        check_routes([zero_in_layer_1(n)], [list(range(n + 1))], TOP_1, ["s"], "vLLM")


def test_short_top_1_samples_are_judged_together() -> None:
    honest = zero_in_layer_1(5)
    honest[3, 1] = 4
    assert check_top_1([16] * 4) == [((0, 16),)] * 4
    assert check_top_1([16] * 3) == [()] * 3
    assert check_top_1([16] * 4, more=(honest,)) == [()] * 5  # the layer was captured
    assert check_top_1([16, 64, 16], more=(honest,)) == [(), ((0, 64),), (), ()]


def test_the_only_expert_is_not_a_layer_of_zeros() -> None:
    shape = RouteShape(num_layers=1, moe_layers=(0,), num_experts=1, experts_per_token=1)
    check_routes([np.zeros((99, 1, 1), dtype=np.uint8)], [list(range(100))], shape, ["s"], "vLLM")
