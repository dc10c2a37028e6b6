"""Whether an engine's routes are well-formed, checked where they enter the trainer.

Megatron takes short rows, extra columns, duplicates and zeros without a word and computes
something else, so nothing malformed may get past here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rltrain.routing.codec import Routes

# A layer that sent this many tokens to expert 0 alone was not captured; fewer may be chance. Only
# matters for top-1 models: with more experts per token, zeros are duplicates.
CHANCE_ROWS = 64


@dataclass(frozen=True)
class RouteShape:
    """What the model's routes must look like."""

    num_layers: int  # decoder layers, with and without a router: the engine reports them all
    moe_layers: tuple[int, ...]  # the ones that have a router, counted from 0
    num_experts: int
    experts_per_token: int


def check_routes(
    routes: Sequence[Routes | None],
    num_tokens: Sequence[int],
    shape: RouteShape,
    samples: Sequence[str],
    source: str,
) -> list[Routes]:
    """Validate the routes of a step and drop the layers without a router.

    Args:
        routes: per sample ``[num_tokens - 1, num_layers, K]`` ids of any integer dtype.
        num_tokens: per sample, prompt and response together.
        samples: how an error names each sample.
        source: how an error names the engine, e.g. ``vLLM 0.30.0``.
    Returns:
        per sample ``[num_tokens - 1, L, K]``, L the layers that have a router.
    Raises:
        ValueError: naming sample, row, layer and engine, on a wrong count of rows, layers or
            experts per token, an id out of range, a layer of zeros, or an expert chosen twice.
    """
    present: list[Routes] = []
    for sample, array, tokens in zip(samples, routes, num_tokens, strict=True):
        expected = (tokens - 1, shape.num_layers, shape.experts_per_token)
        if array is None:
            raise ValueError(f"{source} returned no routes for {sample}: expected {expected}")
        if array.shape != expected or array.dtype.kind not in "iu":
            raise ValueError(
                f"{source}, {sample}: expected integer routes of (tokens - 1, layers, experts per "
                f"token) = {expected}, found {array.dtype} {array.shape}"
            )
        present.append(array)
    if not present:
        return []
    together = np.concatenate(present).take(shape.moe_layers, axis=1)  # [rows of all, L, K]
    bounds = np.cumsum([len(array) for array in present])
    if fault := _first_fault(together, shape):
        row, layer, what = fault
        found = int(np.searchsorted(bounds, row, side="right"))
        row_of_sample = row - (int(bounds[found - 1]) if found else 0)
        raise ValueError(
            f"{source}, {samples[found]}, row {row_of_sample}, layer {shape.moe_layers[layer]}: "
            f"{what}, found {together[row, layer].tolist()}"
        )
    return np.split(together, bounds[:-1])


def _first_fault(ids: Routes, shape: RouteShape) -> tuple[int, int, str] | None:
    """(row, router layer, what is wrong) of the first malformed entry of ``ids`` [rows, L, K]."""
    top = shape.num_experts - 1
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > top):
        row, layer, _ = np.argwhere((ids < 0) | (ids > top))[0]
        return int(row), int(layer), f"expected expert ids from 0 to {top}"
    # Column by column, each contiguous: K is small, and so every comparison is one fast pass.
    columns = np.ascontiguousarray(np.moveaxis(ids, 2, 0))  # [K, rows, L]
    zero_layers = np.flatnonzero(~columns.any(axis=0).any(axis=0))
    if len(zero_layers) and (shape.experts_per_token > 1 or len(ids) >= CHANCE_ROWS):
        return 0, int(zero_layers[0]), "every row of this layer is zero, so it was not captured"
    twice = np.zeros(ids.shape[:2], dtype=bool)
    for one, other in combinations(columns, 2):
        twice |= one == other
    if twice.any():
        row, layer = np.argwhere(twice)[0]
        return int(row), int(layer), f"expected {shape.experts_per_token} distinct experts"
    return None
