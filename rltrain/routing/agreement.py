"""Measures of the agreement between two sets of routes."""

import torch
from torch import Tensor

from rltrain.routing.expert_groups import score_groups, within_groups


def num_shared(experts: Tensor, others: Tensor) -> Tensor:
    """Number of experts of a row that both choices contain, in any order.

    Args:
        experts, others: ids, distinct within a row  # [..., K]

    Returns:
        int64 in 0..K  # [...]
    """
    return (experts.unsqueeze(-1) == others.unsqueeze(-2)).any(-1).sum(-1)


def gate_mass(gates: Tensor, experts: Tensor, native: Tensor) -> Tensor:
    """Gate weight of ``experts`` divided by that of the native choice; 1 if they are the same.

    A small value means that replay uses experts which the router rates low. Values above 1 occur
    only if the native choice is not that of the largest gates (group limits, expert bias).

    Args:
        gates: gates of all experts, not negative  # [S, E]
        experts, native: ids  # [S, K]

    Returns:
        float  # [S]
    """
    chosen = gates.gather(1, experts).sum(1)
    return chosen / gates.gather(1, native).sum(1).clamp_min(torch.finfo(gates.dtype).tiny)


def choice_margin(
    scores: Tensor,
    topk: int,
    num_groups: int | None = None,
    group_topk: int | None = None,
    best: int = 2,
) -> Tensor:
    """Margin of a router's choice: the choice stays while no score changes by half of it.

    The margin is the K-th best score minus the next one. With group limits it is the smaller of two
    margins: that of the experts within the chosen groups, and that of the groups divided by the
    number of scores that a group sums.

    Args:
        scores: the scores of all experts that the router compares  # [S, E]
        topk, num_groups, group_topk: as Megatron's router has them
        best: how many experts score a group (`rltrain.routing.expert_groups.BEST_OF_GROUP`)

    Returns:
        fp32, inf where no expert is left out  # [S]
    """
    scores = scores.float()
    margin = torch.full_like(scores[:, 0], torch.inf)
    if num_groups and group_topk:
        of_groups = score_groups(scores, num_groups, best)
        scores = within_groups(scores, of_groups, group_topk)
        margin = _last_step(of_groups, group_topk) / best
    return torch.minimum(margin, _last_step(scores, topk))


def _last_step(scores: Tensor, count: int) -> Tensor:
    """The ``count``-th best score minus the next one.  # [S, E] -> [S]"""
    if scores.shape[1] == count:
        return torch.full_like(scores[:, 0], torch.inf)
    best = scores.topk(count + 1, dim=1).values
    return best[:, -2] - best[:, -1]


def flipped_before(flipped: Tensor, seq_lens: Tensor, *, read_above: bool) -> Tensor:
    """True for tokens whose log-probability a flip can change.

    Row t - 1 gives the log-probability of token t, so every flip there counts. Layers above a flip
    read its result in all later rows, through attention. No layer reads the result of the last
    layer.

    Args:
        flipped: bool, the row has at least one other expert in the layer  # [N, L]
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

    They are distinct because a row with the same expert twice has fewer than K dispatched copies,
    which breaks the ``tokens * K`` count of the dispatcher. They are spread because one expert for
    all padding would make its rank the slowest.

    Returns:
        int64  # [num_rows, K]
    """
    if experts_per_token > num_experts:
        raise ValueError(f"K={experts_per_token} distinct experts asked of E={num_experts}")
    first = torch.arange(num_rows).unsqueeze(1) * experts_per_token
    return (first + torch.arange(experts_per_token)) % num_experts
