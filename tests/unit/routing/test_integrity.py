"""Malformed routes never get past the boundary, and the error says where they are."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.routing.codec import Routes
from rltrain.routing.integrity import CHANCE_ROWS, RouteShape, check_routes

SHAPE = RouteShape(num_layers=4, moe_layers=(1, 3), num_experts=8, experts_per_token=3)
SAMPLES = ["prompt a sample 0", "prompt a sample 1", "prompt b sample 0"]
NUM_TOKENS = [5, 2, 9]


def well_formed(seed: int = 0, shape: RouteShape = SHAPE) -> list[Routes]:
    rng = np.random.default_rng(seed)
    routes = []
    for tokens in NUM_TOKENS:
        scores = rng.random((tokens - 1, shape.num_layers, shape.num_experts))
        ids = scores.argsort(axis=-1)[..., : shape.experts_per_token].astype(np.uint8)
        ids[:, [n for n in range(shape.num_layers) if n not in shape.moe_layers]] = 0
        routes.append(ids)
    return routes


def check(routes: list[Routes | None], shape: RouteShape = SHAPE) -> list[Routes]:
    return check_routes(routes, NUM_TOKENS, shape, SAMPLES, "vLLM 0.30.0")


@given(st.integers(0, 2**32), st.sampled_from([np.uint8, np.uint16, np.int32]))
def test_layers_without_a_router_are_dropped_and_the_rest_is_unchanged(
    seed: int, dtype: type[np.integer]
) -> None:
    routes = [array.astype(dtype) for array in well_formed(seed)]
    for given_, kept in zip(routes, check(list(routes)), strict=True):
        assert np.array_equal(kept, given_[:, [1, 3]])


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
        (lambda a: None, "returned no routes"),
    ],
)
def test_wrong_shapes_are_refused(
    sample: int, spoil: Callable[[Routes], Routes | None], message: str
) -> None:
    routes: list[Routes | None] = list(well_formed())
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


def test_a_top_1_model_may_choose_expert_0_for_a_while_but_not_for_ever() -> None:
    shape = RouteShape(num_layers=1, moe_layers=(0,), num_experts=8, experts_per_token=1)
    few, many = (np.zeros((n, 1, 1), dtype=np.uint8) for n in (CHANCE_ROWS - 1, CHANCE_ROWS))
    check_routes([few], [CHANCE_ROWS], shape, ["s"], "vLLM")
    with pytest.raises(ValueError, match="not captured"):
        check_routes([many], [CHANCE_ROWS + 1], shape, ["s"], "vLLM")
