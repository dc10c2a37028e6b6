"""How routes are stored: dtype, checksum, several samples to an object, and back.

Routes of a sample are ``[rows, layers, K]`` expert ids. They travel as uint8 up to 256 experts and
as int16 holding the bits of a uint16 above, because torch and NCCL lack most of uint16.
"""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.batch import RouteRef

Routes = NDArray[np.integer]

MAX_EXPERTS = 1 << 16
# Samples are put together until an object is this large: small enough that a rank which wants one
# sample fetches little else, large enough that the store's cost per object vanishes.
OBJECT_BYTES = 1 << 20


def route_dtype(num_experts: int) -> np.dtype[np.integer]:
    """The dtype in which ids of ``num_experts`` experts travel."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"expected 1 to {MAX_EXPERTS} experts, found num_experts={num_experts}")
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.int16)


def encode(ids: Routes, num_experts: int) -> Routes:
    """Ids already known to lie in ``[0, num_experts)``, in the dtype of ``route_dtype``."""
    if route_dtype(num_experts) == np.uint8:
        return ids.astype(np.uint8, copy=False)
    return ids.astype(np.uint16, copy=False).view(np.int16)


def decode(routes: Tensor) -> Tensor:
    """uint8 or int16 routes of any shape as int64 expert ids."""
    if routes.dtype == torch.uint8:
        return routes.long()
    if routes.dtype == torch.int16:
        return routes.long() & 0xFFFF
    raise ValueError(f"expected routes in uint8 or int16, found {routes.dtype}")


def checksum(routes: Routes) -> int:
    return zlib.crc32(np.ascontiguousarray(routes).tobytes())


def assign_objects(rows: Sequence[int], bytes_per_row: int) -> list[tuple[int, int]]:
    """Which object each sample goes to, and its first row there.

    Samples keep their order; an object is closed when the next sample would make it larger than
    ``OBJECT_BYTES``, so one that is larger by itself is alone in its object.
    """
    placed, number, filled = [], 0, 0
    for count in rows:
        if filled and (filled + count) * bytes_per_row > OBJECT_BYTES:
            number, filled = number + 1, 0
        placed.append((number, filled))
        filled += count
    return placed


def blocks_of(ref: RouteRef, layers: slice) -> range:
    """The blocks that hold the router layers ``layers`` (start and stop given, step 1)."""
    if not 0 <= layers.start < layers.stop <= ref.num_layers:
        raise ValueError(f"expected router layers within 0 to {ref.num_layers}, found {layers}")
    per_block = ref.num_layers // len(ref.blocks)
    return range(layers.start // per_block, -(-layers.stop // per_block))


def assemble(ref: RouteRef, arrays: Mapping[int, Routes], layers: slice) -> Routes:
    """One sample's routes ``[rows, layers, K]`` as a writable copy.

    Args:
        arrays: the object of every block in ``blocks_of(ref, layers)``, keyed by block.
    Raises:
        ValueError: when an object is not what ``ref`` says it is.
    """
    per_block = ref.num_layers // len(ref.blocks)
    needed = blocks_of(ref, layers)
    whole = np.concatenate([_cut(ref, block, arrays[block]) for block in needed], axis=1)
    first = needed.start * per_block
    return np.ascontiguousarray(whole[:, layers.start - first : layers.stop - first])


def _cut(ref: RouteRef, block: int, array: Routes) -> Routes:
    """The sample's rows of one block's object, checked."""
    shape = (ref.num_layers // len(ref.blocks), ref.experts_per_token)
    end = ref.start_row + ref.rows
    if array.ndim != 3 or array.shape[1:] != shape or len(array) < end or array.dtype != ref.dtype:
        raise ValueError(
            f"routes, block {block}: expected {ref.dtype} of [{end} or more, {shape[0]}, "
            f"{shape[1]}], found {array.dtype} {list(array.shape)}"
        )
    rows = array[ref.start_row : end]
    if (found := checksum(rows)) != ref.checksums[block]:
        raise ValueError(
            f"routes, block {block}, rows {ref.start_row} to {end}: checksum {found:#010x} is not "
            f"{ref.checksums[block]:#010x}, that of the rows captured at weight version "
            f"{ref.weight_version}: the object was changed or mixed up on its way"
        )
    return rows
