"""Checks that an engine's routes are well-formed, where they enter the trainer.

Megatron silently accepts short rows, extra columns, duplicates and zeros, and then computes wrong
results. So malformed routes must be caught here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrain.config.routing import Fallback
from rltrain.routing.agreement import spread_experts
from rltrain.routing.codec import RouteIds, token_checksum
from rltrain.routing.runs import runs, stale_runs

# A layer that sent this many different tokens only to expert 0 was not captured. Fewer may be
# chance. It only matters for top-1 models: with more experts per token, zeros are duplicates.
CHANCE_TOKENS = 64
# A shorter run of equal rows may be a row that was inserted twice. Then every later row is shifted.
LONG_RUN = 13


@dataclass(frozen=True)
class RouteShape:
    """The shape that routes of the model must have."""

    num_layers: int  # decoder layers, with and without a router: the engine reports them all
    moe_layers: tuple[int, ...]  # layers with a router, counted from 0
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True, eq=False)
class CheckedRoutes:
    """One sample's routes after the check: every row is well-formed."""

    ids: RouteIds  # [tokens - 1, L, K], L layers with a router; tokens from ``first_row`` on
    token_checksum: int  # `rltrain.routing.codec.token_checksum`
    missing: tuple[tuple[int, int], ...] = ()  # ranges of rows that hold arbitrary experts
    faults: tuple[str, ...] = ()  # reasons why they are missing
    first_row: int = 0  # of the sample that the first of these is; `missing` counts from row 0


class _Fault(NamedTuple):
    rows: Any  # the unusable rows of the sample: an index of the row dim
    message: str  # begins with the place, or with a colon


def check_routes(
    routes: Sequence[RouteIds | None],
    tokens: Sequence[Sequence[int]],
    shape: RouteShape,
    samples: Sequence[str],
    source: str,
    fallback: Fallback = "error",
    first_rows: Sequence[int] | None = None,
) -> list[CheckedRoutes]:
    """Validate the routes of a step and drop the layers without a router.

    A row cannot be used in these cases: an id is out of range, an expert occurs twice, the row is
    in a run of stale rows (`stale_runs`) or after a short run, or the row is missing (too few rows
    are read as a prefix). No row of a sample can be used in these cases: a layer is all zeros,
    there are too many rows, another number of layers or experts, or ids that are not integers.

    Args:
        routes: per sample ``[tokens - 1, num_layers, K]`` ids of any integer dtype.
        tokens: per sample, prompt and response together.
        samples: how an error names each sample.
        source: how an error names the engine, e.g. ``vLLM 0.30.0``.
        fallback: ``error`` raises where a row cannot be used; anything else reports it missing.
        first_rows: per sample, the row that its first one is; then there are so many rows less, and
            errors count from there. None: 0
    Raises:
        ValueError: naming sample, row, layer and engine.
    """
    first_rows = first_rows or [0] * len(tokens)
    tokens = [ids_of[first:] for ids_of, first in zip(tokens, first_rows, strict=True)]
    examined = [_examine(*sample, shape) for sample in zip(routes, tokens, strict=True)]
    if shape.experts_per_token == 1 < shape.num_experts:
        _add_top_1_zeros(examined, tokens, shape)
    checked = []
    for sample, ids_of, first, (ids, faults) in zip(
        samples, tokens, first_rows, examined, strict=True
    ):
        messages = tuple(f"{source}, {sample}{fault.message}" for fault in faults)
        if faults and fallback == "error":
            raise ValueError(f"{messages[0]} [RL5007]")
        unusable = np.zeros(len(ids_of) - 1, dtype=bool)
        for fault in faults:
            unusable[fault.rows] = True
        if faults:
            ids = _replaced(ids, unusable, shape)
        missing = tuple((first + start, first + end) for start, end in runs(unusable))
        checked.append(CheckedRoutes(ids, token_checksum(ids_of), missing, messages, first))
    return checked


def _examine(
    array: RouteIds | None, tokens: Sequence[int], shape: RouteShape
) -> tuple[RouteIds, list[_Fault]]:
    """The captured rows of layers with a router, and their faults."""
    rows = len(tokens) - 1
    expected = (rows, shape.num_layers, shape.experts_per_token)
    form_found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
    form = (
        ": expected integer routes of (tokens - 1, layers, experts per token) = "
        f"{expected}, found {'none' if array is None else form_found}"
    )
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "iu"
        or array.shape[1:] != expected[1:]
        or len(array) > rows
    ):
        nothing = np.empty((0, len(shape.moe_layers), shape.experts_per_token), dtype=np.uint8)
        return nothing, [_Fault(slice(None), form)]
    ids = array.take(shape.moe_layers, axis=1)
    faults = [_Fault(slice(len(ids), None), form)] if len(ids) < rows else []
    if len(ids):
        faults += _malformed(ids, shape)
        faults += [
            _Fault(
                slice(start, end if end - start >= LONG_RUN else None),
                f", rows {start} to {end - 1}: every layer repeats one choice of experts though "
                "the tokens differ, so these rows are left over from something else",
            )
            for start, end in stale_runs(ids, np.asarray(tokens), shape.num_experts)
        ]
    return ids, faults


def _malformed(ids: RouteIds, shape: RouteShape) -> Iterator[_Fault]:
    top = shape.num_experts - 1
    if int(ids.min()) < 0 or int(ids.max()) > top:
        outside = (ids < 0) | (ids > top)
        yield _fault_at(np.any(outside, axis=2), ids, shape, f"expected expert ids from 0 to {top}")
    if shape.experts_per_token > 1:
        yield from _layers_of_zeros(_zeros(ids), shape)
    # Compare contiguous columns: K is small, and each comparison is one fast pass.
    columns = np.ascontiguousarray(np.moveaxis(ids, 2, 0))  # [K, rows, L]
    twice = np.zeros(ids.shape[:2], dtype=bool)
    for one, other in combinations(columns, 2):
        twice |= one == other
    if twice.any():
        yield _fault_at(twice, ids, shape, f"expected {shape.experts_per_token} distinct experts")


def _fault_at(bad: NDArray[np.bool_], ids: RouteIds, shape: RouteShape, problem: str) -> _Fault:
    """The rows where ``bad`` [rows, L] holds in any layer; the first is named."""
    row, layer = np.argwhere(bad)[0]
    where = f", row {row}, layer {shape.moe_layers[layer]}"
    return _Fault(
        np.flatnonzero(bad.any(axis=1)), f"{where}: {problem}, found {ids[row, layer].tolist()}"
    )


def _zeros(ids: RouteIds) -> list[int]:
    """The layers in which every row is zero."""
    first_row = ids[:1].any(axis=(0, 2))  # tells most layers apart
    return [n for n in np.flatnonzero(~first_row).tolist() if len(ids) and not ids[:, n].any()]


def _layers_of_zeros(layers: Iterable[int], shape: RouteShape) -> list[_Fault]:
    message = "every row of this layer is zero, so it was not captured"
    return [_Fault(slice(None), f", layer {shape.moe_layers[n]}: {message}") for n in layers]


def _add_top_1_zeros(
    examined: Sequence[tuple[RouteIds, list[_Fault]]],
    tokens: Sequence[Sequence[int]],
    shape: RouteShape,
) -> None:
    """Add faults for layers of zeros in a top-1 model, if enough different tokens rule out
    chance."""
    zeros = [set(_zeros(ids)) for ids, _ in examined]
    if not any(zeros):
        return
    read = [set(t[: len(ids)]) for t, (ids, _) in zip(tokens, examined, strict=True)]
    everywhere = set.intersection(*(z for z, ids in zip(zeros, read, strict=True) if ids))
    many = len(set().union(*read)) >= CHANCE_TOKENS
    for (_, faults), ids, layers in zip(examined, read, zeros, strict=True):
        bad = layers if len(ids) >= CHANCE_TOKENS else layers & everywhere if many else ()
        faults += _layers_of_zeros(sorted(bad), shape)


def _replaced(ids: RouteIds, unusable: NDArray[np.bool_], shape: RouteShape) -> RouteIds:
    """``ids`` with distinct experts in every unusable or missing row."""
    spread = spread_experts(len(unusable), shape.experts_per_token, shape.num_experts).numpy()
    whole = np.repeat(spread[:, None], len(shape.moe_layers), axis=1)
    usable = np.flatnonzero(~unusable)
    whole[usable] = ids[usable]
    return whole
