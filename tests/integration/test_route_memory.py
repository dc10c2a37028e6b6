"""Routes between two raylets: every rank holds its bound once, every node its own stages' layers.

A small version of ``python -m benchmarks.route_memory``, which says what is measured and how.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.route_memory import Size, measure

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SIZE = Size(samples=64, tokens=4096, layers=48, pp=2, dp=2, micro_batch_tokens=8192)
SAMPLE_BYTES = SIZE.route_bytes(1, SIZE.layers // SIZE.pp)
NOISE_BYTES = 6e6  # what allocators, threads and Ray keep of a step: less than the bound by far


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    yield measure(SIZE)


def ranks(found: dict[str, Any], what: str) -> list[dict[str, Any]]:
    return [rank for stage in found["stages"] for rank in stage[what]]


def test_a_rank_holds_its_bound_once_while_it_fetches_and_while_it_replays(
    found: dict[str, Any],
) -> None:
    for fetch, gather in zip(ranks(found, "fetch"), ranks(found, "gather"), strict=True):
        bound = 32 * 4096 * 24 * 8
        assert fetch["bytes"] == fetch["bound"] == bound
        # Beside the result a copy of one sample at a time: to hash it, and to order its layers.
        assert bound <= fetch["numpy_peak"] < bound + 3 * SAMPLE_BYTES
        assert fetch["peak"] < 1.3 * bound + NOISE_BYTES
        assert gather["micro_batches"] == 16
        assert fetch["held"] + gather["peak"] < 1.3 * bound + NOISE_BYTES


def test_a_node_gets_no_layers_but_those_of_its_ranks(found: dict[str, Any]) -> None:
    assert found["all_routes"] <= found["node_a"] * 1.001
    for stage in found["stages"]:
        # Objects have a row less per sample than the token axis, and a header each.
        assert stage["share"] * 0.999 < stage["came_to_b"] < stage["share"] * 1.01


def test_the_controller_has_references_alone(found: dict[str, Any]) -> None:
    controller = found["controller"]
    per_sample = 10e6 / 512
    assert controller["pickled_per_sample"] < per_sample / 4
    assert max(controller["uss"], controller["peak"]) < 64 * per_sample + NOISE_BYTES
    assert found["all_routes"] > 5 * (64 * per_sample + NOISE_BYTES)


def test_nothing_is_left_in_the_stores_after_the_step(found: dict[str, Any]) -> None:
    assert found["left_on_node_a"] == 0
