"""Flips: rows, layers and experts in which replay differs from the router's own choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.routing.codec import decode
from rltrain.routing.fallback import missing_rows


@dataclass(frozen=True)
class LayerFlips:
    """Statistics of the replayed routes of one layer; sums over judged rows."""

    runners_up: Tensor  # rows by byte of `rltrain.routing.deficits.Deficits`, int64  # [256]
    spread: float  # standard deviations of the logits over experts, added up
    uses: Tensor  # number of rows that replayed each expert, int64  # [E]


@dataclass(frozen=True)
class WideFlips:
    """Replayed experts whose deficit is too large for rounding, in order of row and layer."""

    rows: NDArray[np.int64]  # on the token axis  # [W]
    layers: NDArray[np.int64]  # global numbers  # [W]
    columns: NDArray[np.int64]  # 0..K-1  # [W]
    experts: NDArray[np.int64]  # ids  # [W]


def sum_flips(parts: Sequence[LayerFlips]) -> LayerFlips:
    """Sum of the flips of one layer over several sets of rows."""
    return LayerFlips(
        runners_up=torch.stack([part.runners_up for part in parts]).sum(0),
        spread=sum(part.spread for part in parts),
        uses=torch.stack([part.uses for part in parts]).sum(0),
    )


def join_flips(parts: Sequence[WideFlips]) -> WideFlips:
    """Join flips of several sets of rows and layers, in order of row and layer."""
    joined = {
        f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(WideFlips)
    }
    order = np.lexsort((joined["columns"], joined["layers"], joined["rows"]))
    return WideFlips(**{name: values[order] for name, values in joined.items()})


def judged_rows(route_mask: Tensor, seq_lens: Tensor) -> Tensor:
    """Rows that have a captured route, and whose earlier rows in the sequence all have one.

    In a row without a route, trainer and engine may use different experts. Every later row of the
    sequence attends to it, so its scores may differ by more than rounding. Such rows are not
    judged.

    Returns:
        bool  # [N]
    """
    missing = missing_rows(route_mask, seq_lens).long()
    before = missing.cumsum(0) - missing
    starts = seq_lens.cumsum(0) - seq_lens
    return route_mask & (before == before[starts].repeat_interleave(seq_lens))


def wide_flips(
    deficits: Tensor,
    experts: Tensor,
    judged: Tensor,
    layers: tuple[int, ...],
    narrow: Mapping[int, int],
) -> WideFlips:
    """
    Args:
        deficits: bins of `rltrain.routing.deficits`, uint8  # [N, L, K]
        experts: uint8 or int16 as `rltrain.routing.codec` stores them  # [N, L, K]
        judged: `judged_rows`  # [N]
        narrow: by layer, the last bin that is not wide
    """
    _, num_layers, k = deficits.shape
    limits = torch.tensor([narrow[layer] for layer in layers], dtype=torch.uint8)
    # Compare on one flat axis, and select judged rows afterwards: few are wide. Runs in every step.
    wide = (deficits.flatten(1) > limits.repeat_interleave(k)).flatten().nonzero().squeeze(1)
    wide = wide[judged[wide // (num_layers * k)]]
    return WideFlips(
        rows=(wide // (num_layers * k)).numpy(),
        layers=np.asarray(layers, dtype=np.int64)[(wide // k % num_layers).numpy()],
        columns=(wide % k).numpy(),
        experts=decode(experts.flatten()[wide]).numpy(),
    )
