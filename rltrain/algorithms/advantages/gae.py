"""Generalized advantage estimation, from a critic's values."""

import torch

from rltrain.algorithms.advantages.advantage_inputs import AdvantageInputs, Advantages
from rltrain.algorithms.advantages.per_token import discounted_sums, whitened


def gae(inputs: AdvantageInputs) -> Advantages:
    """``A_t = sum over k of (gamma lam)^k delta_(t+k)``, ``delta_t = r_t + gamma V_(t+1) - V_t``
    (arXiv:1506.02438, equation 16), over masked tokens only. The successor of a token is the next
    masked token of its sequence. After the last token the value is 0. The returns are ``A_t + V_t``
    with advantages before whitening. The advantages are whitened over the step.
    """
    assert inputs.values is not None, "a critic is built for what needs_values"
    rewards = inputs.token_rewards[inputs.mask].double()
    values, owner = inputs.values[inputs.mask].double(), inputs.owner
    following = torch.zeros_like(values)
    following[:-1] = torch.where(owner[1:] == owner[:-1], values[1:], 0.0)
    deltas = rewards + inputs.gamma * following - values
    advantages = discounted_sums(deltas, inputs.gamma * inputs.lam, owner)
    return Advantages(inputs.at_mask(whitened(advantages)), inputs.at_mask(advantages + values))
