"""Routes are the same after packing as before, and a mixed-up object is noticed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.batch import RouteRef
from rltrain.routing import objects
from rltrain.routing.codec import RouteIds, decode
from rltrain.routing.integrity import CheckedRoutes, RouteShape
from rltrain.routing.objects import assemble_routes, assign_objects, blocks_of, pack_routes


@given(st.lists(st.integers(1, 400_000), max_size=20), st.integers(1, 64))
def test_objects_are_filled_in_order_and_not_beyond_their_size(rows: list[int], size: int) -> None:
    ends: dict[int, int] = {}
    last = 0
    for count, (number, start) in zip(rows, assign_objects(rows, size), strict=True):
        assert number in (last, last + 1) or not ends
        assert start == ends.get(number, 0)
        ends[number] = start + count
        if start:
            assert ends[number] * size <= objects.OBJECT_BYTES
        last = number
    assert sorted(ends) == list(range(len(ends)))


def test_short_samples_share_an_object_and_long_ones_do_not() -> None:
    assert {number for number, _ in assign_objects([30] * 512, 8)} == {0}
    assert [number for number, _ in assign_objects([2048] * 3, 384)] == [0, 1, 2]


@pytest.mark.parametrize(("num_experts", "itemsize"), [(256, 1), (257, 2)])
def test_nothing_is_padded(num_experts: int, itemsize: int) -> None:
    _, arrays, _ = packed((2, 4), num_experts, rows=(1, 50, 7))
    assert sum(array.nbytes for array in arrays) == (1 + 50 + 7) * len(LAYERS) * 2 * itemsize


LAYERS = (1, 3, 4, 6, 7, 9)  # dense layers between them


def packed(
    block_sizes: tuple[int, ...],
    num_experts: int = 256,
    rows: tuple[int, ...] = (3, 5),
    object_bytes: int = objects.OBJECT_BYTES,
) -> tuple[list[RouteIds], list[RouteIds], list[RouteRef]]:
    """The ids of some samples, the objects that hold them, and a reference to each."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, num_experts, (n, 6, 2)) for n in rows]
    ids[0][0, :, 0] = num_experts - 1
    shape = RouteShape(10, LAYERS, num_experts, 2)
    checked = [CheckedRoutes(array, 0, missing=((0, 1),)) for array in ids]
    arrays, refs = pack_routes(checked, shape, block_sizes, 7, "vLLM 0.30.0", object_bytes)
    for array in arrays:
        array.flags.writeable = False  # as they come out of the object store
    return ids, arrays, refs


def fetched(ref: RouteRef, arrays: list[RouteIds], layers: list[int]) -> RouteIds:
    needed = {block: arrays[ref.blocks[block]] for block in blocks_of(ref, layers)}
    return assemble_routes(ref, needed, layers)


BLOCKS = st.sampled_from([(6,), (1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1), (3, 1, 2)])


@given(BLOCKS, st.lists(st.sampled_from(LAYERS), unique=True))
@example((3, 1, 2), [9, 1, 6])  # out of order, from blocks apart
@example((1, 5), [])
def test_any_layers_can_be_read_back_in_any_order(
    blocks: tuple[int, ...], layers: list[int]
) -> None:
    ids, arrays, refs = packed(blocks)
    for sample, ref in zip(ids, refs, strict=True):
        found = fetched(ref, arrays, layers)
        assert found.shape == (len(sample), len(layers), 2)
        assert np.array_equal(found, sample[:, [LAYERS.index(layer) for layer in layers]])
        assert found.flags.writeable and found.flags.c_contiguous


def test_only_the_blocks_that_hold_the_layers_are_needed() -> None:
    _, _, (ref, _) = packed((3, 1, 2))
    assert blocks_of(ref, [9, 1]) == [0, 2]
    assert blocks_of(ref, [6]) == [1]


def test_samples_share_no_object_where_none_is_allowed() -> None:
    ids, arrays, refs = packed((4, 2), rows=(3, 1, 2), object_bytes=0)
    assert [ref.blocks for ref in refs] == [(0, 1), (2, 3), (4, 5)]
    assert [len(arrays[ref.blocks[0]]) for ref in refs] == [3, 1, 2]
    for sample, ref in zip(ids, refs, strict=True):
        assert np.array_equal(fetched(ref, arrays, [1, 9]), sample[:, [0, 5]])


def test_samples_in_several_objects_keep_their_blocks_apart() -> None:
    ids, arrays, refs = packed((4, 2), rows=(3, 5, 2, 4), object_bytes=50)
    assert [ref.blocks for ref in refs] == [(0, 1), (2, 3), (4, 5), (4, 5)]
    assert [ref.start_row for ref in refs] == [0, 0, 0, 2]
    for sample, ref in zip(ids, refs, strict=True):
        assert np.array_equal(fetched(ref, arrays, [1, 9]), sample[:, [0, 5]])


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(255, "uint8"), (256, "uint8"), (257, "int16"), (512, "int16")]
)
def test_ids_survive_the_whole_way_at_every_width(num_experts: int, dtype: str) -> None:
    ids, arrays, refs = packed((2, 4), num_experts, rows=(3, 50))
    for sample, ref in zip(ids, refs, strict=True):
        found = fetched(ref, arrays, [9, 1])
        assert found.dtype == dtype == ref.dtype
        assert np.array_equal(decode(torch.from_numpy(found)).numpy(), sample[:, [5, 0]])


def test_a_reference_says_what_it_refers_to() -> None:
    _, _, (_, ref) = packed((2, 4))
    assert (ref.start_row, ref.rows, ref.first_row, ref.missing) == (3, 5, 0, ((0, 1),))
    assert (ref.layers, ref.num_experts, ref.experts_per_token) == (LAYERS, 256, 2)
    assert (ref.producer, ref.weight_version, ref.block_sizes) == ("vLLM 0.30.0", 7, (2, 4))


def test_layers_without_routes_are_refused() -> None:
    _, _, (ref, _) = packed((2, 4))
    with pytest.raises(ValueError, match=r"found \[2, 8\]"):
        blocks_of(ref, [8, 1, 2])


@pytest.mark.parametrize(
    "change",
    [
        {"start_row": 2},  # shifted by a row
        {"checksums": (0, 0)},
        {"dtype": "int16"},
        {"rows": 6},
        {"experts_per_token": 3},
        {"block_sizes": (4, 2)},
    ],
)
def test_an_object_that_is_not_the_samples_is_refused(change: dict[str, Any]) -> None:
    _, arrays, (_, ref) = packed((2, 4))
    with pytest.raises(ValueError, match="routes, block 0"):
        fetched(replace(ref, **change), arrays, list(LAYERS))


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("sample", [0, 1])
def test_one_changed_id_is_found_in_every_block(sample: int, block: int) -> None:
    _, arrays, refs = packed((2, 3, 1))
    ref = refs[sample]
    held = {n: arrays[handle].copy() for n, handle in enumerate(ref.blocks)}
    layers = [layer for n, layer in enumerate(LAYERS) if n not in range(*_SPANS[block])]
    held[block][ref.start_row + ref.rows - 1, -1, -1] ^= 1
    with pytest.raises(ValueError, match=rf"block {block}, rows .* checksum"):
        assemble_routes(ref, held, LAYERS)
    assemble_routes(ref, held, layers)  # the other blocks are as they were


_SPANS = ((0, 2), (2, 5), (5, 6))


def test_swapped_blocks_are_refused() -> None:
    _, arrays, (_, ref) = packed((3, 3))
    with pytest.raises(ValueError, match="checksum"):
        assemble_routes(ref, {0: arrays[1], 1: arrays[0]}, LAYERS)
