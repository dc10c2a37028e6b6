"""Advantages that compare the responses to one prompt with each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.advantages.advantage_inputs import AdvantageInputs, Advantages

STD_EPS = 1e-6


def grpo(inputs: AdvantageInputs) -> Advantages:
    """``A_i = (r_i - mean(r)) / (std(r) + 1e-6)`` over a group (DeepSeekMath, arXiv:2402.03300,
    section 4.1.2), with the unbiased standard deviation. The advantages of a group are exactly 0 if
    its rewards are all equal, or if it has one response.
    """
    groups = Groups.of(inputs)
    centered = groups.centered(inputs.scores)
    squares = groups.sums(centered.square())
    std = (squares / (groups.count - 1).clamp_min(1)).sqrt()
    return Advantages(inputs.over_tokens(centered / (std[groups.index] + STD_EPS)))


def dr_grpo(inputs: AdvantageInputs) -> Advantages:
    """``A_i = r_i - mean(r)`` over a group (Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    return Advantages(inputs.over_tokens(Groups.of(inputs).centered(inputs.scores)))


def rloo(inputs: AdvantageInputs) -> Advantages:
    """``A_i = r_i - mean of the other responses of the group`` (arXiv:2402.14740, equation 8). This
    equals the distance from the mean of all n, times ``n / (n - 1)``. It is 0 for a single
    response."""
    groups = Groups.of(inputs)
    stretch = groups.count / (groups.count - 1).clamp_min(1)
    return Advantages(inputs.over_tokens(groups.centered(inputs.scores) * stretch[groups.index]))


@dataclass(frozen=True)
class Groups:
    """The scored sequences by prompt. Sequences that are not scored belong to no group."""

    index: Tensor  # int64, group number from 0  # [B]
    scored: Tensor  # bool  # [B]
    count: Tensor  # float64, scored sequences of each group  # [groups]

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> "Groups":
        _, index = inputs.group_ids.unique(return_inverse=True)
        num_groups = int(index.max()) + 1 if len(index) else 0
        count = torch.zeros(num_groups, dtype=torch.float64)
        scored = inputs.scored
        return cls(index, scored, count.index_add_(0, index, scored.double()))

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the scored sequences of each group.  # [B] -> [groups]"""
        kept = torch.where(self.scored, values, 0.0)
        return torch.zeros_like(self.count).index_add_(0, self.index, kept)

    def centered(self, values: Tensor) -> Tensor:
        """Minus the mean of the group; exactly 0 if all of a group are equal.  # [B] -> [B]"""
        less = values - (self.sums(values) / self.count.clamp_min(1))[self.index]
        # Equal values may differ from their mean by rounding, which must not be amplified.
        return torch.where(self._all_equal(values)[self.index], 0.0, less)

    def _all_equal(self, values: Tensor) -> Tensor:
        """True for each group whose scored values are all equal.  # [groups]"""
        low, high = torch.full_like(self.count, torch.inf), torch.full_like(self.count, -torch.inf)
        index, kept = self.index[self.scored], values[self.scored]
        low = low.scatter_reduce(0, index, kept, "amin")
        high = high.scatter_reduce(0, index, kept, "amax")
        return low >= high
