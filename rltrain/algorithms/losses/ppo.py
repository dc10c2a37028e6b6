"""PPO's clipped surrogate."""

import torch

from rltrain.algorithms.losses.loss_inputs import (
    LossInputs,
    TokenLoss,
    clip_stats,
    clipped_surrogate,
)


def ppo(inputs: LossInputs) -> TokenLoss:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` (arXiv:1707.06347, equation 7, negated), with two
    clip ranges (DAPO, arXiv:2503.14476, equation 10). With ``dual_clip`` c it is at most ``-c A``
    where A < 0 (arXiv:1912.09729, equation 5), so that one large ratio cannot dominate the batch.
    """
    ratio, advantages, config = inputs.log_ratio.exp(), inputs.advantages, inputs.config
    loss = clipped_surrogate(ratio, advantages, config)
    stats = clip_stats(ratio, advantages, config)
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages
        stats["dual_clip_fraction"] = (advantages < 0) & (loss > bound)
        loss = torch.where(stats["dual_clip_fraction"], bound, loss)
    return TokenLoss(loss, ratio, stats)
