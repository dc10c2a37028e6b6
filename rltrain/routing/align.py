"""From the routes of a batch to what each router row of this rank must choose."""

import torch
from torch import Tensor

from rltrain.parallel.token_layout import PAD, gather_rows
from rltrain.routing.agreement import spread_experts


def router_targets(
    routes: Tensor, route_mask: Tensor, index: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Gather routes to the rows that this rank's routers see.

    Args:
        routes: expert ids in any integer dtype  # [N, L, K]
        route_mask: rows whose experts are known  # [N]
        index: the token each router row reads, PAD for padding (`TokenLayout.routers`)  # [S]

    Returns:
        The experts in the dtype of ``routes``, padding rows spread over all experts  # [S, L, K]
        True where a row must use them; False lets the row choose live  # [S]
    """
    experts = gather_rows(routes, index, 0)
    padding = index == PAD
    spread = spread_experts(int(padding.sum()), experts.shape[2], num_experts)
    experts[padding] = spread.to(experts.dtype).unsqueeze(1).expand(-1, experts.shape[1], -1)
    return experts, gather_rows(route_mask, index, False) | padding


def last_rows(seq_lens: Tensor) -> Tensor:
    """True for the last token of every sequence: nothing was sampled after it, so no engine read it
    and it owes no route.  # [B] -> [N] bool"""
    last = torch.zeros(int(seq_lens.sum()), dtype=torch.bool)
    last[seq_lens.cumsum(0) - 1] = True
    return last
