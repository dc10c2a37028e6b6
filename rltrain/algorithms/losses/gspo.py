"""Group sequence policy optimization: one importance ratio for a whole response."""

from rltrain.algorithms.losses.loss_inputs import (
    LossInputs,
    TokenLoss,
    clip_stats,
    clipped_surrogate,
)


def gspo(inputs: LossInputs) -> TokenLoss:
    """PPO's surrogate of ``s = (pi(y) / pi_old(y)) ** (1 / |y|)`` (arXiv:2507.18071, equations 5
    and 7), written per token: the value of s, the gradient of the token's own log-probability
    (equation 14). Where a response's advantages are equal, both are GSPO's own.
    """
    token = inputs.logprobs - inputs.logprobs.detach()
    ratio = (inputs.sequence_mean(inputs.log_ratio.detach()) + token).exp()
    loss = clipped_surrogate(ratio, inputs.advantages, inputs.config)
    return TokenLoss(loss, ratio, clip_stats(ratio, inputs.advantages, inputs.config))
