"""Tests whether wide flips are random or systematic.

Rounding causes wide flips (`rltrain.routing.flips`) in few rows, at random places. Routes of other
tokens, layers or samples cause one in nearly every row that they reach. Routes are stored, sliced
and computed along several axes: layer, column, position, sample and expert. Every axis is divided
into cells. A cell fails if it has too many wide flips.
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
"""Maximum share of the rows of a layer in which rounding alone causes a wide flip."""
CLUSTER = 4
"""Number of wide contexts that count as one, because contexts of a sample or token are
correlated."""
STEPS = 10_000
"""Number of healthy steps in which less than one false alarm is expected."""
SCATTERED = 0.2
"""Minimum fit of the best cell. Below it no cell explains where the wide flips are."""
AGAIN = -2
"""Cell number of a further wide flip in the same row and layer, on axes that count rows."""
NUM_PARTS, EDGE_ROWS, PERIODS = 16, 16, range(2, 65)


@dataclass(frozen=True)
class JudgedStep:
    """The step whose routes are tested. Judged rows are those of
    `rltrain.routing.flips.judged_rows`."""

    tokens: Ints  # [N]
    seq_lens: Ints  # [B]
    judged: NDArray[np.bool_]  # [N]
    layers: tuple[int, ...]  # global numbers, in order
    experts_per_token: int
    uses: Mapping[int, Tensor]  # layer -> judged rows that replayed each expert  # [E]


@dataclass(frozen=True, eq=False)
class Finding:
    """A cell in which wide flips are systematic."""

    where: str  # e.g. "sample 17 of 64"
    count: int  # wide flips in the cell
    size: int  # rows of the cell; rows x layers for a cell of all layers; uses of an expert's cell
    fit: float  # F1 score: 1 for a cell that holds all wide flips and nothing else
    cells: Ints = field(repr=False)  # cell of every wide flip, on the axis of this cell  # [W]
    cell: int  # number of this cell on its axis

    @property
    def share(self) -> float:
        return self.count / self.size

    @property
    def inside(self) -> NDArray[np.bool_]:
        """True for the wide flips in this cell.  # [W]"""
        is_inside: NDArray[np.bool_] = self.cells == self.cell
        return is_inside


class _RowPositions(NamedTuple):
    """Positions of rows in their samples.  # [rows] each"""

    sample: Ints
    position: Ints  # in the sample
    num_routed: Ints  # rows of the sample that must have a route


@dataclass(frozen=True)
class _RowAxis:
    """An axis on which all layers of a row are in one cell."""

    cell: Callable[[_RowPositions], Ints]  # -1 for none
    num_cells: int
    least_share: float
    name: Callable[[int], str]
    by_layer: bool = False  # also test every layer separately


@dataclass(frozen=True)
class _Axis:
    cells: Ints  # cell of every wide flip; -1 for none, `AGAIN` if it is not counted  # [W]
    num_cells: int
    sizes: Callable[[], Ints]  # size of every cell, see `Finding.size`  # [C]
    least_share: float
    name: Callable[[int], str]


def systematic(flips: WideFlips, step: JudgedStep) -> list[Finding]:
    """The cells that fail, the most telling one first.

    A cell fails on two conditions. The share of its rows with a wide flip reaches the least share
    of the axis. And so many different contexts are improbable under rounding alone. Rows with the
    same prefix are one context: they are the same computation, and rounding changes them alike."""
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
    """Sort by fit, best first. Among similar fits the smallest cell comes first, and among equal
    sizes that of the last axis. If no cell fits, the flips are scattered; then the largest cells
    come first.
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
    """Limit of the log-probability of a cell. With it, 0.1 false alarms of all cells together are
    expected in `STEPS` steps."""
    return -log(10 * STEPS * num_cells)


def fails(
    counts: Ints, distinct: Ints, sizes: Ints, least_share: float, limit: float
) -> NDArray[np.bool_]:
    """True for cells with too many wide flips.

    The log-probability is Chernoff's bound on the tail of a Poisson distribution, applied to
    clusters of contexts. The number of all contexts of a cell is estimated as ``distinct * sizes /
    counts``. `HEALTHY_SHARE` of them are expected to be wide.

    Args:
        counts: wide flips of every cell  # [C]
        distinct: different contexts among them  # [C]
        sizes: see `Finding.size`  # [C]
        limit: of the log-probability
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
    """Context number of every wide flip: equal for the same layer and prefix of tokens.  # [W]"""
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
    """All axes. A row with several wide experts in a layer counts once, except on the axes of
    columns and experts."""
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
    """The axes of rows, the most telling last: `_ordered` prefers the last of equal cells. So
    smaller periods come after larger ones."""
    yield from map(_period_axis, reversed(PERIODS))
    yield _RowAxis(
        lambda at: at.sample, num_samples, 0.25, lambda c: f"sample {c} of {num_samples}", True
    )
    yield _RowAxis(
        lambda at: at.position * NUM_PARTS // at.num_routed,
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
        lambda at: np.where(
            at.num_routed - at.position <= EDGE_ROWS, at.num_routed - at.position - 1, -1
        ),
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
