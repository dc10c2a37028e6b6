"""Packs the routes of a step into objects of a store. An object holds several samples and one block
of layers.

Routes of a sample are ``[rows, L, K]``. With blocks, a pipeline rank fetches only its own layers.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from rltrain.batch import RouteRef
from rltrain.routing.codec import RouteIds, encode, route_checksum, route_dtype
from rltrain.routing.integrity import CheckedRoutes, RouteShape

OBJECT_BYTES = 1 << 20
"""Maximum bytes of an object of several samples, where one node has all ranks that read it: large
enough to make the cost per object negligible. Where they are on several nodes, samples share no
object, so that each node fetches its own sequences and no others."""


def pack_routes(
    routes: Sequence[CheckedRoutes],
    shape: RouteShape,
    block_sizes: Sequence[int],
    weight_version: int,
    producer: str,
    object_bytes: int = OBJECT_BYTES,
) -> tuple[list[RouteIds], list[RouteRef]]:
    """The arrays to store, and a reference for each sample. ``blocks`` are indices into the
    arrays.

    Args:
        object_bytes: see `assign_objects`
    """
    encoded = [encode(sample.ids, shape.num_experts) for sample in routes]
    itemsize = route_dtype(shape.num_experts).itemsize
    row_bytes = max(block_sizes) * shape.experts_per_token * itemsize
    places = assign_objects([len(array) for array in encoded], row_bytes, object_bytes)
    members: dict[int, list[RouteIds]] = {}
    for array, (number, _) in zip(encoded, places, strict=True):
        members.setdefault(number, []).append(array)
    spans = _spans(block_sizes)
    wholes = [np.concatenate(parts) for parts in members.values()]
    objects = [np.ascontiguousarray(whole[:, span]) for whole in wholes for span in spans]
    refs = [
        RouteRef(
            start_row=start,
            rows=len(array),
            first_row=sample.first_row,
            missing=sample.missing,
            token_checksum=sample.token_checksum,
            layers=shape.moe_layers,
            experts_per_token=shape.experts_per_token,
            num_experts=shape.num_experts,
            dtype=str(array.dtype),
            block_sizes=tuple(block_sizes),
            checksums=tuple(route_checksum(array[:, span]) for span in spans),
            blocks=tuple(range(number * len(spans), (number + 1) * len(spans))),
            weight_version=weight_version,
            producer=producer,
        )
        for sample, array, (number, start) in zip(routes, encoded, places, strict=True)
    ]
    return objects, refs


def assign_objects(
    rows: Sequence[int], bytes_per_row: int, object_bytes: int = OBJECT_BYTES
) -> list[tuple[int, int]]:
    """The object of each sample, and its first row there.

    Samples keep their order. An object is closed if the next sample would make it larger than
    ``object_bytes``. A sample that is larger has its own object.
    """
    placed, number, filled = [], 0, 0
    for count in rows:
        if filled and (filled + count) * bytes_per_row > object_bytes:
            number, filled = number + 1, 0
        placed.append((number, filled))
        filled += count
    return placed


def blocks_of(ref: RouteRef, layers: Sequence[int]) -> list[int]:
    """The blocks that hold the layers with the global numbers ``layers``."""
    if unknown := sorted(set(layers) - set(ref.layers)):
        raise ValueError(
            f"expected layers among {list(ref.layers)}, which have routes by {ref.producer}, "
            f"found {unknown}"
            " [RL5007]"
        )
    wanted = set(layers)
    return [
        block
        for block, span in enumerate(_spans(ref.block_sizes))
        if wanted.intersection(ref.layers[span])
    ]


def assemble_routes(
    ref: RouteRef,
    arrays: Mapping[int, RouteIds],
    layers: Sequence[int],
    out: RouteIds | None = None,
) -> RouteIds:
    """One sample's routes ``[rows, len(layers), K]``, in the order of ``layers``, as a copy.

    Args:
        arrays: the object of every block in ``blocks_of(ref, layers)``, keyed by block.
        layers: global numbers, any of ``ref.layers``.
        out: array to fill and return, of the same shape and dtype; None: a new array.
    Raises:
        ValueError: an object does not match ``ref``.
    """
    spans = _spans(ref.block_sizes)
    shape = (ref.rows, len(layers), ref.experts_per_token)
    routes = np.empty(shape, dtype=ref.dtype) if out is None else out
    assert routes.shape == shape and routes.dtype == ref.dtype, (routes.shape, routes.dtype, ref)
    for block in blocks_of(ref, layers):
        held = ref.layers[spans[block]]
        asked = [i for i, layer in enumerate(layers) if layer in held]
        rows = _cut(ref, block, arrays[block])
        routes[:, asked] = rows[:, [held.index(layers[i]) for i in asked]]
    return routes


def block_layers(ref: RouteRef) -> list[tuple[int, ...]]:
    """The layers of each block."""
    return [ref.layers[span] for span in _spans(ref.block_sizes)]


def _spans(block_sizes: Sequence[int]) -> list[slice]:
    """The slice of each block on the layer dim."""
    ends = accumulate(block_sizes)
    return [slice(end - size, end) for size, end in zip(block_sizes, ends, strict=True)]


def _cut(ref: RouteRef, block: int, array: RouteIds) -> RouteIds:
    """The sample's rows of one block's object, checked."""
    shape = (ref.block_sizes[block], ref.experts_per_token)
    end = ref.start_row + ref.rows
    if array.ndim != 3 or array.shape[1:] != shape or len(array) < end or array.dtype != ref.dtype:
        raise ValueError(
            f"routes, block {block}: expected {ref.dtype} of [{end} or more, {shape[0]}, "
            f"{shape[1]}], found {array.dtype} {list(array.shape)}"
            " [RL5007]"
        )
    rows = array[ref.start_row : end]
    if (crc := route_checksum(rows)) != ref.checksums[block]:
        raise ValueError(
            f"routes, block {block}, rows {ref.start_row} to {end}: checksum {crc:#010x} is not "
            f"{ref.checksums[block]:#010x}, that of the rows captured at weight version "
            f"{ref.weight_version}: the object was changed or mixed up on its way"
            " [RL5007]"
        )
    return rows
