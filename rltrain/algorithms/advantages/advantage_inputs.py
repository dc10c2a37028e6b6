"""Inputs and outputs of advantage estimators."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.sequences import require_finite, sequence_of, sequence_sum


@dataclass(frozen=True)
class AdvantageInputs:
    """The responses of a whole step. A sequence whose reward failed has no token in ``mask``.

    Raises:
        ValueError: a reward or a value under the mask is NaN or infinite; names it.
    """

    rewards: Tensor  # float, per sequence; not read if the reward failed  # [B]
    token_rewards: Tensor  # float, `rewards` at the last response token, and penalties  # [N]
    seq_lens: Tensor  # [B]
    group_ids: Tensor  # int64, the prompt that each sequence answers  # [B]
    mask: Tensor  # bool, response tokens of scored sequences  # [N]
    values: Tensor | None = None  # float, values of the prefix before each token  # [N]
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        bad = (self.scored & ~self.rewards.isfinite()).nonzero().flatten()
        if len(bad):
            raise ValueError(
                f"rewards: sequence {int(bad[0])} has {float(self.rewards[bad[0]])}, expected a "
                "finite number; a sequence whose reward failed has no token in the mask"
                " [RL5005]"
            )
        for name in ("token_rewards", "values"):
            values: Tensor | None = getattr(self, name)
            if values is not None:
                require_finite(name, values, self.mask, self.seq_lens)

    @property
    def scored(self) -> Tensor:
        """True for sequences with a token under the mask.  # [B]"""
        return sequence_sum(self.mask.double(), self.seq_lens) > 0

    @property
    def scores(self) -> Tensor:
        """float64, sum of the token rewards of each sequence.  # [B]"""
        rewarded = torch.where(self.mask, self.token_rewards.double(), 0.0)
        return sequence_sum(rewarded, self.seq_lens)

    @property
    def owner(self) -> Tensor:
        """Sequence number of each masked token.  # [M]"""
        return sequence_of(self.seq_lens)[self.mask]

    def at_mask(self, values: Tensor) -> Tensor:
        """float32, ``values`` at the masked tokens, 0 elsewhere.  # [M] -> [N]"""
        return torch.zeros(len(self.mask)).masked_scatter_(self.mask, values.float())

    def over_tokens(self, per_sequence: Tensor) -> Tensor:
        """The value of the sequence at every masked token, 0 elsewhere.  # [B] -> [N]"""
        return self.at_mask(per_sequence[self.owner])


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns."""

    advantages: Tensor  # float32, 0 off the mask  # [N]
    returns: Tensor | None = None  # float32, targets of the critic, 0 off the mask  # [N]


def require_advantages(result: Advantages, inputs: AdvantageInputs, name: str) -> Advantages:
    """Return ``result`` after checks, because a user's estimator may return anything.

    Args:
        name: value of ``algorithm.advantage``, for errors

    Raises:
        ValueError: it is no `Advantages`, does not have one number per token, or has NaN or
            infinity under the mask.
    """
    if not isinstance(result, Advantages):
        raise ValueError(
            f"algorithm.advantage={name}: expected Advantages, found {type(result).__name__}"
            " [RL5006]"
        )
    for field in ("advantages", "returns"):
        values: Tensor | None = getattr(result, field)
        if values is None:
            continue
        if values.shape != inputs.mask.shape:
            raise ValueError(
                f"algorithm.advantage={name}: expected {field} of shape "
                f"{tuple(inputs.mask.shape)}, one per token, found {tuple(values.shape)}"
                " [RL5006]"
            )
        where = f"{field} by algorithm.advantage={name}"
        require_finite(where, values, inputs.mask, inputs.seq_lens)
    return result


@dataclass(frozen=True)
class Advantage:
    """An entry of the registry."""

    estimate: Callable[[AdvantageInputs], Advantages]
    compares: bool = False
    """Whether it compares the responses to a prompt. A single response then has no advantage."""
    needs_values: bool = False
    """Whether a critic is built."""
