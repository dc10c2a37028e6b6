"""What an advantage is computed from, and what it is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole step's responses. A sequence whose reward failed has no token in ``mask``.

    Raises:
        ValueError: a reward or a value under the mask is NaN or infinite; names it.
    """

    rewards: Tensor  # float, of each sequence, a failed one's is not read  # [B]
    token_rewards: Tensor  # float, `rewards` at the last response token, and penalties  # [N]
    seq_lens: Tensor  # [B]
    group_ids: Tensor  # int64, which prompt each sequence answers  # [B]
    mask: Tensor  # bool, response tokens of scored sequences  # [N]
    values: Tensor | None = None  # float, of the prefix before each token  # [N]
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        _check_finite("rewards", self.rewards[self.scored], self.scored.nonzero().flatten())
        for name in ("token_rewards", "values"):
            values: Tensor | None = getattr(self, name)
            if values is not None:
                _check_finite(name, values[self.mask], self.sequence[self.mask])

    @property
    def sequence(self) -> Tensor:
        """Which sequence each token is of.  # [N]"""
        return torch.arange(len(self.seq_lens)).repeat_interleave(self.seq_lens)

    @property
    def scored(self) -> Tensor:
        """bool, sequences with a token under the mask.  # [B]"""
        return self.per_sequence_sum(self.mask.double()) > 0

    def per_sequence_sum(self, values: Tensor) -> Tensor:
        """[N] -> [B]"""
        return torch.zeros(len(self.seq_lens), dtype=values.dtype).index_add_(
            0, self.sequence, values
        )

    @property
    def scores(self) -> Tensor:
        """float64, what a sequence's tokens were rewarded together.  # [B]"""
        return self.per_sequence_sum(torch.where(self.mask, self.token_rewards.double(), 0.0))

    def over_tokens(self, per_sequence: Tensor) -> Tensor:
        """Give every masked token its sequence's number, the others zero.  # [B] -> [N]"""
        return torch.where(self.mask, per_sequence[self.sequence], 0.0).float()


@dataclass(frozen=True)
class Advantages:
    advantages: Tensor  # float32, 0 off the mask  # [N]
    returns: Tensor | None = None  # float32, what a critic is to learn, 0 off the mask  # [N]


@dataclass(frozen=True)
class Advantage:
    """An entry of the registry."""

    estimate: Callable[[AdvantageInputs], Advantages]
    compares: bool = False
    """Whether it compares the responses to a prompt, so that one alone learns nothing."""
    needs_values: bool = False
    """Whether a critic is built."""


def _check_finite(name: str, values: Tensor, sequence: Tensor) -> None:
    bad = (~values.isfinite()).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"{name}: sequence {int(sequence[bad[0]])} has {float(values[bad[0]])}, expected a "
            "finite number"
        )
