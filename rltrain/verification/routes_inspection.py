"""Measures of a routes file: coverage, duplicates, repeats, load. Pure."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rltrain.routing.align import last_rows
from rltrain.routing.codec import decode
from rltrain.routing.runs import runs
from rltrain.verification.routes_file import Routes


@dataclass(frozen=True)
class Inspection:
    """Measures of some routes. Dicts are by global layer number, over captured rows."""

    num_tokens: int
    num_sequences: int
    dtype: str
    coverage: float  # captured rows / (tokens - 1), summed over sequences
    valid_fraction: float  # captured rows with distinct experts in every layer / captured rows
    zero_layers: tuple[int, ...]  # every captured row is zero
    duplicate_rows: dict[int, int]  # rows that name an expert twice
    longest_repeat: dict[int, int]  # consecutive rows of one sequence with the same experts
    peak_load: dict[int, float]  # load of the busiest expert / mean load


def inspect_routes(routes: Routes) -> Inspection:
    """Measure some routes. Shares over no rows at all are 1, loads over none 0."""
    ids = decode(routes.ids).sort(-1).values  # [N, L, K]
    captured = routes.route_mask
    duplicate = (ids[..., 1:] == ids[..., :-1]).any(-1)[captured]  # [captured rows, L]
    owed = ~last_rows(routes.seq_lens)
    starts = torch.zeros(len(ids), dtype=torch.bool)
    starts[routes.seq_lens.cumsum(0) - routes.seq_lens] = True
    repeats = (ids[1:] == ids[:-1]).all(-1)  # [N - 1, L]
    repeats &= (captured[1:] & captured[:-1] & ~starts[1:]).unsqueeze(1)
    rows = ids[captured]

    def by_layer(values: list[Any]) -> dict[int, Any]:
        return dict(zip(routes.layers, values, strict=True))

    layers = range(len(routes.layers))
    return Inspection(
        num_tokens=len(ids),
        num_sequences=len(routes.seq_lens),
        dtype=str(routes.ids.dtype).removeprefix("torch."),
        coverage=_share(captured[owed]),
        valid_fraction=_share(~duplicate.any(1)),
        zero_layers=tuple(
            layer
            for layer, used in zip(routes.layers, rows.any(0).any(-1).tolist(), strict=True)
            if len(rows) and not used
        ),
        duplicate_rows=by_layer(duplicate.sum(0).tolist()),
        longest_repeat=by_layer([_longest(repeats[:, n], bool(len(rows))) for n in layers]),
        peak_load=by_layer([_peak(rows[:, n], routes.num_experts) for n in layers]),
    )


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 1.0


def _longest(repeats: Tensor, any_rows: bool) -> int:
    return max((end - start for start, end in runs(repeats.numpy())), default=0) + any_rows


def _peak(ids: Tensor, num_experts: int) -> float:
    load = torch.bincount(ids.flatten(), minlength=num_experts).double()
    return float(load.max() / load.mean()) if ids.numel() else 0.0
