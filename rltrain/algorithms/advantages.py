"""What makes a response better than its alternatives."""

import torch
from torch import Tensor

STD_EPS = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, *, normalize_by_std: bool) -> Tensor:
    """GRPO's group-relative advantage, one number a sequence.

    ``A_i = (r_i - mean(r)) / (std(r) + 1e-6)`` over the responses to one prompt (DeepSeekMath,
    arXiv:2402.03300, section 4.1.2), with the unbiased standard deviation; without the division it
    is Dr. GRPO's (arXiv:2503.20783). A group whose rewards are all equal, or of one response, has
    nothing to compare: its advantages are exactly zero.

    Args:
        rewards: float  # [B]
        group_ids: which prompt each sequence answers, any integers  # [B]

    Returns:
        float  # [B]

    Raises:
        ValueError: a reward is NaN or infinite.
    """
    if not bool(rewards.isfinite().all()):
        bad = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(
            f"rewards: sequence {bad} has reward {float(rewards[bad])}, expected a finite number"
        )
    rewards = rewards.double()
    _, group = group_ids.unique(return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    count = torch.zeros(num_groups, dtype=torch.float64).index_add_(
        0, group, torch.ones_like(rewards)
    )
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, rewards) / count
    centered = rewards - mean[group]
    # Equal rewards may differ from their mean by rounding; dividing that by its own size is noise.
    centered = torch.where(_all_equal(rewards, group, num_groups)[group], 0.0, centered)
    if not normalize_by_std:
        return centered.float()
    squares = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, centered.square())
    std = (squares / (count - 1).clamp_min(1)).sqrt()
    return (centered / (std[group] + STD_EPS)).float()


def _all_equal(rewards: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """True for each group whose rewards are one number.  # [num_groups]"""
    low = torch.full((num_groups,), torch.inf, dtype=rewards.dtype)
    high = torch.full((num_groups,), -torch.inf, dtype=rewards.dtype)
    low = low.scatter_reduce(0, group, rewards, "amin")
    high = high.scatter_reduce(0, group, rewards, "amax")
    return low == high


def over_tokens(per_sequence: Tensor, seq_lens: Tensor, mask: Tensor) -> Tensor:
    """Give every masked token its sequence's number, the others zero.  # [B] -> [N]"""
    return torch.where(mask, per_sequence.repeat_interleave(seq_lens), 0.0)
