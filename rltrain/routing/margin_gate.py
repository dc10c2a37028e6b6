"""Whether wide flips are chance or systematic: by layer, column, position, sample and expert.

Rounding leaves a wide flip (`rltrain.routing.flips`) in few rows, anywhere. Routes of other tokens,
layers or samples leave one in nearly every row that they reach. So every axis along which routes
are stored, sliced or computed is cut into cells, and a cell fails that has too many.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rltrain.routing.flips import WideFlips

Ints = NDArray[np.int64]

HEALTHY_SHARE = 5e-4
"""Share of rows that rounding alone makes wide in a layer, at most."""
CLUSTER = 4
"""So many wide contexts count as one: those of a sample, or of a token, resemble each other."""
STEPS = 10_000
"""Over so many healthy steps less than one false alarm is accepted."""
SCATTERED = 0.2
"""Fit of the best cell below which no cell explains where the wide flips lie."""
AGAIN = -2
"""The cell of a wide flip whose row and layer have another one already, where rows are counted."""
NUM_PARTS, EDGE_ROWS, PERIODS = 16, 16, range(2, 65)


@dataclass(frozen=True)
class JudgedStep:
    """The step that is judged."""

    tokens: Ints  # [N]
    seq_lens: Ints  # [B]
    judged: NDArray[np.bool_]  # `rltrain.routing.flips.judged_rows`  # [N]
    layers: tuple[int, ...]  # global numbers, in order
    experts_per_token: int
    uses: Mapping[int, Tensor]  # layer -> judged rows that were given each expert  # [E]


@dataclass(frozen=True, eq=False)
class Finding:
    """A cell in which wide flips are systematic."""

    where: str  # e.g. "sample 17 of 64"
    count: int  # wide flips in it
    size: int  # its rows, times layers where it is not of one layer, or uses of its expert
    fit: float  # 1 for a cell that holds all wide flips and nothing else (the F1 score)
    cells: Ints = field(repr=False)  # of each wide flip, on the axis of this cell  # [W]
    cell: int

    @property
    def share(self) -> float:
        return self.count / self.size

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Which wide flips lie in it.  # [W]"""
        is_inside: NDArray[np.bool_] = self.cells == self.cell
        return is_inside


class _RowPositions(NamedTuple):
    """Where rows lie."""

    sample: Ints
    position: Ints  # in the sample
    owed: Ints  # rows of the sample that owe a route


@dataclass(frozen=True)
class _RowAxis:
    """An axis on which all layers of a row lie in one cell."""

    cell: Callable[[_RowPositions], Ints]  # -1 for none
    num_cells: int
    least_share: float
    name: Callable[[int], str]
    by_layer: bool = False  # judge each layer apart, too


@dataclass(frozen=True)
class _Axis:
    cells: Ints  # of each wide flip, -1 for none, `AGAIN` where it is not counted  # [W]
    num_cells: int
    sizes: Callable[[], Ints]  # of each cell: rows, or rows x layers, or uses of an expert  # [C]
    least_share: float
    name: Callable[[int], str]


def systematic(flips: WideFlips, step: JudgedStep) -> list[Finding]:
    """The cells that fail, the one that says most first.

    A cell fails where the share of its rows that are wide reaches the axis' least share, and so
    many different contexts among them are no chance. Rows of the same prefix are one computation,
    which rounding moves in the same way, so they are one context.
    """
    if not len(flips.rows):
        return []
    axes = list(_axes(flips, step))
    limit = log_limit(sum(axis.num_cells for axis in axes))
    contexts, findings = None, []
    for axis in axes:
        total = int((axis.cells != AGAIN).sum())
        counts = np.bincount(axis.cells[axis.cells >= 0], minlength=axis.num_cells)
        if not (counts > CLUSTER).any():
            continue
        sizes = axis.sizes()
        if not fails(counts, counts, sizes, axis.least_share, limit).any():
            continue
        contexts = _contexts(flips, step) if contexts is None else contexts
        inside = axis.cells >= 0
        pairs = np.unique(axis.cells[inside] * len(contexts) + contexts[inside])
        distinct = np.bincount(pairs // len(contexts), minlength=axis.num_cells)
        for cell in np.flatnonzero(
            fails(counts, distinct, sizes, axis.least_share, limit)
        ).tolist():
            count, size = int(counts[cell]), int(sizes[cell])
            fit = 2 * count / (size + total)
            findings.append(Finding(axis.name(cell), count, size, fit, axis.cells, cell))
    return _ordered(findings)


def _ordered(findings: list[Finding]) -> list[Finding]:
    """Best fit first; of several that fit alike, the smallest, and of equal ones the last axis'.

    Where none fits, the flips lie scattered, and the largest cells come first.
    """
    best = max((finding.fit for finding in findings), default=0.0)
    if best < SCATTERED:
        return sorted(findings, key=lambda finding: (-finding.size, -finding.share))
    fitting = [finding for finding in reversed(findings) if finding.fit >= 0.95 * best]
    others = [finding for finding in findings if finding.fit < 0.95 * best]
    return [
        *sorted(fitting, key=lambda finding: finding.size),
        *sorted(others, key=lambda finding: -finding.fit),
    ]


def log_limit(num_cells: int) -> float:
    """Of the logarithm of a cell's chance: all cells fail a tenth of a time in `STEPS` steps."""
    return -log(10 * STEPS * num_cells)


def fails(
    counts: Ints, distinct: Ints, sizes: Ints, least_share: float, limit: float
) -> NDArray[np.bool_]:
    """Which cells have too many wide flips.

    Chance is Chernoff's bound on the tail of a Poisson distribution, of clusters of contexts. A
    cell has as many contexts as make ``distinct`` of them its share, and `HEALTHY_SHARE` of those
    is what is expected.

    Args:
        counts: wide flips of each cell
        distinct: contexts among them
        sizes: rows, or what is counted, of each cell
        limit: of the logarithm of chance
    """
    some = np.maximum(counts, 1)
    clusters = distinct / CLUSTER
    expected = np.maximum(clusters, 1 / CLUSTER) * HEALTHY_SHARE * np.maximum(sizes, 1) / some
    chance = clusters - expected - clusters * np.log(np.maximum(clusters / expected, 1.0))
    failing: NDArray[np.bool_] = (
        (counts > CLUSTER) & (counts >= least_share * sizes) & (chance < limit)
    )
    return failing


def _contexts(flips: WideFlips, step: JudgedStep) -> Ints:
    """The same number for wide flips of equal layer and equal tokens up to their row.  # [W]"""
    position = _positions_of(np.arange(len(step.tokens)), step).position
    with np.errstate(over="ignore"):  # a polynomial modulo 2 ** 64
        powers = np.cumprod(np.full(int(position.max()) + 1, 0x9E3779B97F4A7C15, dtype=np.uint64))
        terms = (step.tokens.astype(np.uint64) + np.uint64(1)) * powers[position]
        sums = np.cumsum(terms, dtype=np.uint64)
        starts = np.cumsum(step.seq_lens) - step.seq_lens
        prefix = sums - np.repeat(sums[starts] - terms[starts], step.seq_lens)
        key = prefix[flips.rows] * np.uint64(1_000_003) + flips.layers.astype(np.uint64)
    numbers: Ints = np.unique(key, return_inverse=True)[1]
    return numbers


def _positions_of(rows: Ints, step: JudgedStep) -> _RowPositions:
    ends = np.cumsum(step.seq_lens)
    sample = np.searchsorted(ends, rows, side="right")
    starts = ends - step.seq_lens
    return _RowPositions(sample, rows - starts[sample], step.seq_lens[sample] - 1)


def _axes(flips: WideFlips, step: JudgedStep) -> Iterator[_Axis]:
    """A row with several wide experts in a layer counts once, but by column and by expert."""
    layers, num_layers, k = step.layers, len(step.layers), step.experts_per_token
    at = np.searchsorted(np.asarray(layers), flips.layers)
    again = np.zeros(len(at), dtype=bool)
    again[1:] = (flips.rows[1:] == flips.rows[:-1]) & (at[1:] == at[:-1])
    num_rows = int(step.judged.sum())
    yield _Axis(
        np.where(again, AGAIN, 0),
        1,
        lambda: np.full(1, num_rows * num_layers),
        0.005,
        lambda _: "rows all over the step",
    )
    yield _Axis(
        np.where(again, AGAIN, at),
        num_layers,
        lambda: np.full(num_layers, num_rows),
        0.005,
        lambda c: f"layer {layers[c]}",
    )
    if k > 1:
        yield _Axis(
            at * k + flips.columns,
            num_layers * k,
            lambda: np.full(num_layers * k, num_rows),
            0.005,
            lambda c: f"layer {layers[c // k]}, column {c % k}",
        )
    num_experts = len(step.uses[layers[0]])
    yield _Axis(
        at * num_experts + flips.experts,
        num_layers * num_experts,
        lambda: np.concatenate([step.uses[layer].numpy() for layer in layers]),
        0.25,
        lambda c: f"layer {layers[c // num_experts]}, expert {c % num_experts}",
    )
    wide = _positions_of(flips.rows, step)
    everywhere = cache(lambda: _positions_of(np.flatnonzero(step.judged), step))
    for axis in _row_axes(len(step.seq_lens)):
        cells = np.where(again, AGAIN, axis.cell(wide))
        yield _whole(axis, cells, everywhere, num_layers)
        if axis.by_layer:
            yield _by_layer(axis, cells, everywhere, layers, at)


def _whole(
    axis: _RowAxis, cells: Ints, everywhere: Callable[[], _RowPositions], num_layers: int
) -> _Axis:
    return _Axis(
        cells,
        axis.num_cells,
        lambda: _sizes(axis, everywhere) * num_layers,
        axis.least_share,
        axis.name,
    )


def _by_layer(
    axis: _RowAxis,
    cells: Ints,
    everywhere: Callable[[], _RowPositions],
    layers: tuple[int, ...],
    at: Ints,
) -> _Axis:
    count = len(layers)
    return _Axis(
        np.where(cells < 0, cells, cells * count + at),
        axis.num_cells * count,
        lambda: np.repeat(_sizes(axis, everywhere), count),
        axis.least_share,
        lambda c: f"{axis.name(c // count)}, layer {layers[c % count]}",
    )


def _sizes(axis: _RowAxis, everywhere: Callable[[], _RowPositions]) -> Ints:
    cells = axis.cell(everywhere())
    return np.bincount(cells[cells >= 0], minlength=axis.num_cells)


def _row_axes(num_samples: int) -> Iterator[_RowAxis]:
    """Of cells that hold the same rows the last axis, and the smallest period, says most."""
    yield from map(_period_axis, reversed(PERIODS))
    yield _RowAxis(
        lambda at: at.sample, num_samples, 0.25, lambda c: f"sample {c} of {num_samples}", True
    )
    yield _RowAxis(
        lambda at: at.position * NUM_PARTS // at.owed,
        NUM_PARTS,
        0.05,
        lambda c: f"rows from {c / NUM_PARTS:.0%} to {(c + 1) / NUM_PARTS:.0%} of every sample",
        True,
    )
    yield _RowAxis(
        lambda at: np.where(at.position < EDGE_ROWS, at.position, -1),
        EDGE_ROWS,
        0.25,
        lambda c: f"row {c} of every sample",
    )
    yield _RowAxis(
        lambda at: np.where(at.owed - at.position <= EDGE_ROWS, at.owed - at.position - 1, -1),
        EDGE_ROWS,
        0.25,
        lambda c: f"the last row but {c} of every sample" if c else "the last row of every sample",
    )


def _period_axis(period: int) -> _RowAxis:
    return _RowAxis(
        lambda at: at.position % period,
        period,
        0.25,
        lambda c: f"row {c} of every {period} rows of a sample",
    )
