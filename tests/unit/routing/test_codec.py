"""Routes are the same after storing as before, and a mixed-up object is noticed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.batch import RouteRef
from rltrain.routing import codec
from rltrain.routing.codec import Routes, assemble, assign_objects, blocks_of, decode, encode


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "int16"), (65536, "int16")]
)
def test_every_id_survives(num_experts: int, dtype: str) -> None:
    ids = np.arange(num_experts, dtype=np.int64)
    stored = encode(ids, num_experts)
    assert stored.dtype == dtype
    assert decode(torch.from_numpy(stored)).tolist() == ids.tolist()


@pytest.mark.parametrize("num_experts", [0, 65537])
def test_more_experts_than_16_bits_are_refused(num_experts: int) -> None:
    with pytest.raises(ValueError, match=f"num_experts={num_experts}"):
        codec.route_dtype(num_experts)


def test_only_stored_dtypes_are_decoded() -> None:
    with pytest.raises(ValueError, match="int32"):
        decode(torch.zeros(1, dtype=torch.int32))


@given(st.lists(st.integers(1, 400_000), max_size=20), st.integers(1, 64))
def test_objects_are_filled_in_order_and_not_beyond_their_size(rows: list[int], size: int) -> None:
    ends: dict[int, int] = {}
    last = 0
    for count, (number, start) in zip(rows, assign_objects(rows, size), strict=True):
        assert number in (last, last + 1) or not ends
        assert start == ends.get(number, 0)
        ends[number] = start + count
        if start:
            assert ends[number] * size <= codec.OBJECT_BYTES
        last = number
    assert sorted(ends) == list(range(len(ends)))


def test_short_samples_share_an_object_and_long_ones_do_not() -> None:
    assert {number for number, _ in assign_objects([30] * 512, 8)} == {0}
    assert [number for number, _ in assign_objects([2048] * 3, 384)] == [0, 1, 2]


def stored(seed: int, num_layers: int, per_block: int) -> tuple[list[Routes], RouteRef]:
    """Two samples in one object for each block, and the reference to the second."""
    rng = np.random.default_rng(seed)
    first, second = (rng.integers(0, 256, (n, num_layers, 2), dtype=np.uint8) for n in (3, 5))
    spans = [slice(i, i + per_block) for i in range(0, num_layers, per_block)]
    objects = [np.concatenate([first, second])[:, span] for span in spans]
    ref = RouteRef(
        start_row=3,
        rows=5,
        num_layers=num_layers,
        experts_per_token=2,
        dtype="uint8",
        checksums=tuple(codec.checksum(second[:, span]) for span in spans),
        weight_version=7,
        blocks=tuple(range(len(spans))),
    )
    for array in objects:
        array.flags.writeable = False  # as they come out of the object store
    return [second, *objects], ref


@given(st.sampled_from([1, 2, 3, 6]), st.data())
def test_any_layers_can_be_read_back(per_block: int, data: st.DataObject) -> None:
    (sample, *objects), ref = stored(0, 6, per_block)
    start = data.draw(st.integers(0, 5))
    layers = slice(start, data.draw(st.integers(start + 1, 6)))
    needed = blocks_of(ref, layers)
    found = assemble(ref, {block: objects[block] for block in needed}, layers)
    assert np.array_equal(found, sample[:, layers])
    assert found.flags.writeable and found.flags.c_contiguous
    assert len(needed) <= (layers.stop - layers.start) // per_block + 2


def test_layers_outside_the_model_are_refused() -> None:
    _, ref = stored(0, 6, 2)
    with pytest.raises(ValueError, match="0 to 6"):
        blocks_of(ref, slice(4, 7))


@pytest.mark.parametrize(
    "change",
    [
        {"start_row": 2},  # shifted by a row
        {"checksums": (0, 0, 0)},
        {"dtype": "int16"},
        {"rows": 6},
        {"experts_per_token": 3},
        {"num_layers": 9},
    ],
)
def test_an_object_that_is_not_the_samples_is_refused(change: dict[str, object]) -> None:
    (_, *objects), ref = stored(0, 6, 2)
    with pytest.raises(ValueError, match="routes, block 0"):
        assemble(replace(ref, **change), dict(enumerate(objects)), slice(0, 6))  # type: ignore[arg-type]


def test_swapped_blocks_are_refused() -> None:
    (_, *objects), ref = stored(0, 6, 2)
    with pytest.raises(ValueError, match="checksum"):
        assemble(ref, {0: objects[1], 1: objects[0], 2: objects[2]}, slice(0, 6))
