"""Group-limited routing: a token takes its experts only from its best groups."""

import torch
from torch import Tensor

BEST_OF_GROUP = {"softmax": 1, "sigmoid": 2}
"""By score function: number of best experts whose scores are summed to score a group, as in
DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3 (https://arxiv.org/abs/2412.19437)."""


def score_groups(scores: Tensor, num_groups: int, best: int) -> Tensor:
    """The sum of the ``best`` largest scores of each group.  # [S, E] -> [S, groups]"""
    sums: Tensor = scores.unflatten(1, (num_groups, -1)).topk(best, dim=-1).values.sum(-1)
    return sums


def within_groups(scores: Tensor, of_groups: Tensor, group_topk: int) -> Tensor:
    """``scores``, and -inf for every expert outside the ``group_topk`` best groups.  # [S, E]"""
    chosen = torch.zeros_like(of_groups, dtype=torch.bool)
    chosen.scatter_(1, of_groups.topk(group_topk, dim=1, sorted=False).indices, True)
    size = scores.shape[1] // of_groups.shape[1]
    return scores.masked_fill(~chosen.repeat_interleave(size, dim=1), -torch.inf)
