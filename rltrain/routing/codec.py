"""Storage of expert ids: uint8 for up to 256 experts, two bytes above.

The two bytes are an int16 with the bits of a uint16, because torch and NCCL hardly support uint16.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RouteIds = NDArray[np.integer]

MAX_EXPERTS = 1 << 16


def route_dtype(num_experts: int) -> np.dtype[np.integer]:
    """The dtype in which ids of ``num_experts`` experts are stored and sent."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"expected 1 to {MAX_EXPERTS} experts, found num_experts={num_experts}")
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.int16)


def encode(ids: RouteIds, num_experts: int) -> RouteIds:
    """``ids`` in the dtype of `route_dtype`. They must lie in ``[0, num_experts)``; nothing checks
    it."""
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


def route_checksum(routes: RouteIds) -> int:
    return zlib.crc32(np.ascontiguousarray(routes).tobytes())


def token_checksum(tokens: Sequence[int] | NDArray[np.integer]) -> int:
    """Checksum of the tokens of a sample without the last one, which no router reads."""
    return route_checksum(np.asarray(tokens[:-1], dtype=np.int64))
