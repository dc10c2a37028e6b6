"""Sums, means and checks by sequence, for sequences that lie end to end on one token axis."""

import torch
from torch import Tensor


def sequence_of(seq_lens: Tensor) -> Tensor:
    """Sequence number of each token.  # [B] -> [N]"""
    return torch.arange(len(seq_lens)).repeat_interleave(seq_lens)


def sequence_sum(values: Tensor, seq_lens: Tensor) -> Tensor:
    """[N] -> [B]"""
    sums = torch.zeros(len(seq_lens), dtype=values.dtype)
    return sums.index_add_(0, sequence_of(seq_lens), values)


def sequence_mean(values: Tensor, mask: Tensor, seq_lens: Tensor) -> Tensor:
    """Mean over the masked tokens of each sequence; 0 if there are none.  # [N], [N] -> [B]"""
    sums = sequence_sum(torch.where(mask, values, 0.0), seq_lens)
    return sums / sequence_sum(mask.to(values.dtype), seq_lens).clamp_min(1)


def require_finite(name: str, values: Tensor, mask: Tensor, seq_lens: Tensor) -> None:
    """Raise ValueError, naming the first sequence, unless all numbers under the mask are finite."""
    bad = (mask & ~values.isfinite()).nonzero().flatten()
    if len(bad):
        sequence = int(sequence_of(seq_lens)[bad[0]])
        token = int(bad[0]) - int(seq_lens[:sequence].sum())
        raise ValueError(
            f"{name}: token {token} of sequence {sequence} has {float(values[bad[0]])}, expected a "
            f"finite number ({len(bad)} of {int(mask.sum())} response tokens have none): look for "
            "overflow in what computed them"
            " [RL5005]"
        )
