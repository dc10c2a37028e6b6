"""Rows with a missing route: their number, the tokens that leave the loss, and the limits.

The last token of a sequence needs no route. It is not counted here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rltrain.config.routing import Fallback
from rltrain.routing.align import last_rows

NAMED = 5  # samples that an error lists


def missing_rows(route_mask: Tensor, seq_lens: Tensor) -> Tensor:
    """True for rows that need a route and have none.  # bool [N], int64 [B] -> bool [N]"""
    return ~route_mask & ~last_rows(seq_lens)


def sample_shares(missing: Tensor, seq_lens: Tensor) -> Tensor:
    """Missing rows / rows that need a route, per sequence; 0 if no row needs one. # -> float64
    [B]"""
    sequence = torch.arange(len(seq_lens)).repeat_interleave(seq_lens)
    counts = torch.zeros(len(seq_lens), dtype=torch.float64)
    counts.index_add_(0, sequence, missing.double())
    return counts / (seq_lens - 1).clamp_min(1)


def batch_share(missing: Tensor, seq_lens: Tensor) -> float:
    """Missing rows / rows that need a route, over all sequences."""
    return int(missing.sum()) / max(1, int((seq_lens - 1).sum()))


def surviving_tokens(
    missing: Tensor, seq_lens: Tensor, fallback: Fallback, max_sample_fallback: float
) -> Tensor:
    """True for tokens that may stay in the loss.

    ``drop`` removes every token after a missing row. Row t gives the log-probability of token t +
    1, and all later rows attend to it. With any ``fallback``, a sequence whose share of missing
    rows is above ``max_sample_fallback`` is removed whole.

    Returns:
        bool  # [N]
    """
    too_many = sample_shares(missing, seq_lens) > max_sample_fallback
    survives = ~too_many.repeat_interleave(seq_lens)
    if fallback == "drop":
        before = missing.long().cumsum(0) - missing.long()  # of earlier sequences too
        starts = seq_lens.cumsum(0) - seq_lens
        survives &= before == before[starts].repeat_interleave(seq_lens)
    return survives


def check_budget(
    missing: Tensor,
    seq_lens: Tensor,
    samples: Sequence[str],
    fallback: Fallback,
    max_batch_fallback: float,
) -> None:
    """End the run if rows may not fall back, or if too many do.

    Args:
        samples: the name of each sequence

    Raises:
        ValueError: rows are missing and ``fallback`` is ``error``; names the first
        RuntimeError: their share is above ``max_batch_fallback``; names the worst samples
    """
    shares = sample_shares(missing, seq_lens)
    if fallback == "error" and missing.any():
        sample = int(shares.nonzero()[0])
        start = int(seq_lens[:sample].sum())
        row = int(missing[start:].nonzero()[0])
        raise ValueError(
            f"{samples[sample]}, row {row}: expected a captured route, found none; "
            "routing_replay.fallback chooses what such rows do"
            " [RL5004]"
        )
    if (share := batch_share(missing, seq_lens)) > max_batch_fallback:
        worst = shares.argsort(descending=True, stable=True)[:NAMED]
        named = ", ".join(f"{samples[n]} ({shares[n]:.1%})" for n in worst if shares[n] > 0)
        raise RuntimeError(
            f"{share:.2%} of the step's rows have no usable route, in {int((shares > 0).sum())} of "
            f"{len(seq_lens)} samples; expected routing_replay.max_batch_fallback="
            f"{max_batch_fallback} or less. Worst: {named}. The engine's log says what was wrong"
            " [RL5004]"
        )
