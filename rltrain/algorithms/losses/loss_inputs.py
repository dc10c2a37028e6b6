"""Inputs and outputs of policy losses. A loss is a number per token, never a mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rltrain.algorithms.kl import MAX_LOG_RATIO
from rltrain.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class LossInputs:
    """The slots of one micro-batch on one rank. Values off the mask have no meaning."""

    logprobs: Tensor  # of the current policy, with gradient  # [S]
    old_logprobs: Tensor  # [S]
    advantages: Tensor  # [S]
    mask: Tensor  # bool, tokens in the loss  # [S]
    sequence_mean: Callable[[Tensor], Tensor]
    """Mean of a number per slot over the loss tokens of the slot's sequence, including those of
    other context-parallel ranks. Without gradient. # [S] -> [S]"""
    config: AlgorithmConfig

    @property
    def log_ratio(self) -> Tensor:
        """log pi(y) - log pi_old(y) of each sampled token.  # [S]"""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class TokenLoss:
    """What a loss returns: numbers of each slot."""

    loss: Tensor  # with gradient  # [S]
    ratio: Tensor  # the importance ratio in the loss  # [S]
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """Statistics whose mean over the loss tokens is logged: clip fractions as ``policy/NAME``,
    statistics of a user's loss as ``custom/NAME``.  # [S] each"""


def require_token_loss(result: TokenLoss, inputs: LossInputs) -> TokenLoss:
    """Return ``result`` after checking that it has one number per slot.

    A mean would silently be weighted like one slot.

    Raises:
        ValueError: it is no `TokenLoss`, or a shape differs.
    """
    name = f"algorithm.loss={inputs.config.loss}"
    if not isinstance(result, TokenLoss):
        raise ValueError(f"{name}: expected a TokenLoss, found {type(result).__name__} [RL5006]")
    for part, values in {"loss": result.loss, "ratio": result.ratio, **result.stats}.items():
        if values.shape != inputs.logprobs.shape:
            raise ValueError(
                f"{name}: expected {part} of shape {tuple(inputs.logprobs.shape)}, a number for "
                f"each slot and no mean of them, found {tuple(values.shape)}"
                " [RL5006]"
            )
    return result


def clip_stats(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> dict[str, Tensor]:
    """True where clipping to ``[1 - clip_low, 1 + clip_high]`` removes the gradient, by side."""
    return {
        "clip_fraction_low": (ratio < 1 - config.clip_low) & (advantages < 0),
        "clip_fraction_high": (ratio > 1 + config.clip_high) & (advantages > 0),
    }


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Tensor:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``.  # [S] -> [S]"""
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
