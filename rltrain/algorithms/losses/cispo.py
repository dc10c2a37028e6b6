"""Clipped importance sampling: every token keeps its gradient."""

from rltrain.algorithms.losses.loss_inputs import LossInputs, TokenLoss


def cispo(inputs: LossInputs) -> TokenLoss:
    """``-sg(clip(r, 1 - low, 1 + high)) A log pi`` (MiniMax-M1, arXiv:2506.13585, equations 4 and
    5). The paper has no lower bound: set ``clip_low=1`` for that. Clipping bounds the weight of a
    token with either sign of its advantage, so both signs count as clipped.
    """
    ratio, config = inputs.log_ratio.detach().exp(), inputs.config
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    stats = {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high}
    return TokenLoss(loss, ratio, stats)
