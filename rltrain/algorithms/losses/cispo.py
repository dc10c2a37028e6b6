"""Clipped importance sampling: every token keeps its gradient."""

from rltrain.algorithms.losses.inputs import LossInputs, TokenLoss, clip_stats


def cispo(inputs: LossInputs) -> TokenLoss:
    """``-sg(clip(r, 1 - low, 1 + high)) A log pi`` (MiniMax-M1, arXiv:2506.13585, equations 4 and
    5). The paper leaves the lower end open: that is ``clip_low=1``.
    """
    ratio, config = inputs.log_ratio.detach().exp(), inputs.config
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -weight * inputs.advantages * inputs.logprobs
    return TokenLoss(loss, ratio, clip_stats(ratio, inputs.advantages, config))
