"""Gathers the routes of a batch to the rows of this rank's routers."""

from functools import lru_cache

import torch
from torch import Tensor

from rltrain.parallel.token_layout import PAD, to_device
from rltrain.routing.agreement import spread_experts


def router_targets(routes: Tensor, index: Tensor, num_experts: int) -> Tensor:
    """Gather routes to the rows that this rank's routers see, on the routes' device.

    Args:
        routes: expert ids in any integer dtype  # [N, L, K]
        index: which of the N each router row gets, on the CPU. PAD for a row that gets none of
            them: such rows get distinct experts, spread over all.  # [S]

    Returns:
        The experts in the dtype of ``routes``.  # [S, L, K]
    """
    device, (_, num_layers, k) = routes.device, routes.shape
    padding = index == PAD
    if len(routes) == 0:
        experts = routes.new_zeros((len(index), num_layers, k))
    else:
        experts = routes.index_select(0, to_device(index.masked_fill(padding, 0), device))
    at = padding.nonzero().flatten()
    # Rounded up, so that it is there already for most micro-batches.
    spread = _spread(1 << len(at).bit_length(), k, num_experts, routes.dtype, device)
    spread = spread[: len(at)].unsqueeze(1).expand(-1, num_layers, -1)
    return experts.index_copy_(0, to_device(at, device), spread)


@lru_cache(maxsize=32)
def _spread(
    rows: int, k: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return to_device(spread_experts(rows, k, num_experts).to(dtype), device)


def last_rows(seq_lens: Tensor) -> Tensor:
    """True for the last token of every sequence. No engine reads that token, because nothing is
    sampled after it, so it has no route.  # [B] -> [N] bool"""
    last = torch.zeros(int(seq_lens.sum()), dtype=torch.bool)
    last[seq_lens.cumsum(0) - 1] = True
    return last
