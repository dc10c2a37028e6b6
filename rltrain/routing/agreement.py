"""How far two sets of routes agree: what replay changes, in numbers."""

import torch
from torch import Tensor


def num_shared(experts: Tensor, others: Tensor) -> Tensor:
    """Experts of a row that the other choice also has; the order does not matter.

    Args:
        experts, others: ids, distinct within a row  # [..., K]

    Returns:
        int64 in 0..K  # [...]
    """
    return (experts.unsqueeze(-1) == others.unsqueeze(-2)).any(-1).sum(-1)


def gate_mass(gates: Tensor, experts: Tensor, native: Tensor) -> Tensor:
    """Gate weight of ``experts`` over that of the native choice: 1 where they are the same.

    How little the router thinks of what it is made to use. Above 1 only where the native choice is
    not that of the largest gates (group limits, expert bias).

    Args:
        gates: of all experts, not negative  # [S, E]
        experts, native: ids  # [S, K]

    Returns:
        float  # [S]
    """
    chosen = gates.gather(1, experts).sum(1)
    return chosen / gates.gather(1, native).sum(1).clamp_min(torch.finfo(gates.dtype).tiny)


def flipped_before(flipped: Tensor, seq_lens: Tensor, *, read_above: bool) -> Tensor:
    """True for tokens whose log-probability a flip can have touched.

    Row t - 1 yields the log-probability of token t: every flip there counts. The layers above a
    flip read it in every later row, through attention; above the last layer nothing does.

    Args:
        flipped: a row chose at least one other expert, by layer; bool  # [N, L]
        seq_lens: int64  # [B]
        read_above: whether the model has layers above the last of these

    Returns:
        bool  # [N]
    """
    read = (flipped if read_above else flipped[:, :-1]).any(1).long()
    before = read.cumsum(0) - read  # flips below t, earlier sequences included
    starts = seq_lens.cumsum(0) - seq_lens
    row_before = flipped.any(1).roll(1)
    row_before[starts] = False
    return (before > before[starts].repeat_interleave(seq_lens)) | row_before


def spread_experts(num_rows: int, experts_per_token: int, num_experts: int) -> Tensor:
    """Distinct experts for padding rows, spread evenly over all experts.

    Distinct, because a row that names one expert twice has fewer than K dispatched copies and
    breaks the dispatcher's ``tokens * K`` count; spread, because padding that all went to one
    expert would make its rank the slowest.

    Returns:
        int64  # [num_rows, K]
    """
    if experts_per_token > num_experts:
        raise ValueError(f"K={experts_per_token} distinct experts asked of E={num_experts}")
    first = torch.arange(num_rows).unsqueeze(1) * experts_per_token
    return (first + torch.arange(experts_per_token)) % num_experts
