"""The reducer of all losses: ``sum(weights * per_token)``. The weights contain the denominator.

Weights are computed once for a whole mini-batch, before it is cut into data-parallel shards and
micro-batches. So loss and gradient do not depend on how the mini-batch is cut.
"""

from typing import Literal

import torch
from torch import Tensor

from rltrain.algorithms.sequences import sequence_of, sequence_sum

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
]


def loss_weights(
    loss_mask: Tensor, seq_lens: Tensor, aggregation: Aggregation, max_response_tokens: int
) -> Tensor:
    """The weight of every token of one mini-batch; all zero if no token is in the loss.

    ``token_mean`` (DAPO, arXiv:2503.14476, equation 12): 1 / masked tokens.
    ``sequence_mean_token_mean`` (GRPO, arXiv:2402.03300, equation 3): 1 / masked tokens of the
    sequence / sequences with a masked token. ``sequence_mean_token_sum``: 1 / sequences with a
    masked token. ``constant`` (Dr. GRPO, arXiv:2503.20783, section 3.2): 1 / (all sequences x
    ``max_response_tokens``), which no masking changes.

    Args:
        loss_mask: bool  # [N]
        seq_lens: int64  # [B]

    Returns:
        float32  # [N]
    """
    mask = loss_mask.double()
    if aggregation == "token_mean":
        return (mask / mask.sum().clamp_min(1)).float()
    if aggregation == "constant":
        return (mask / max(1, len(seq_lens) * max_response_tokens)).float()
    tokens = sequence_sum(mask, seq_lens)
    sequences = (tokens > 0).sum().clamp_min(1)
    if aggregation == "sequence_mean_token_sum":
        return (mask / sequences).float()
    return (mask / tokens.clamp_min(1)[sequence_of(seq_lens)] / sequences).float()


def weighted_sum(weights: Tensor, per_token: Tensor) -> Tensor:
    """``sum(weights * per_token)`` over tokens with a weight. NaN elsewhere is ignored."""
    return torch.where(weights != 0, weights * per_token, 0.0).sum()
