"""Clipped importance sampling: every token keeps its gradient."""

from rltrain.algorithms.losses.loss_inputs import LossInputs, TokenLoss


def cispo(inputs: LossInputs) -> TokenLoss:
    """``-sg(clip(r, 1 - low, 1 + high)) A log pi`` (MiniMax-M1, arXiv:2506.13585, equations 4 and
    5). The paper leaves the lower end open: that is ``clip_low=1``. Clipping bounds the weight of
    a token whatever its advantage, so it counts as clipped with either sign.
    """
    ratio, config = inputs.log_ratio.detach().exp(), inputs.config
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -ratio.clamp(low, high) * inputs.advantages * inputs.logprobs
    stats = {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high}
    return TokenLoss(loss, ratio, stats)
