"""REINFORCE++: no critic, and one normalization over the whole step instead of one a group."""

from rltrain.algorithms.advantages.advantage_inputs import AdvantageInputs, Advantages
from rltrain.algorithms.advantages.group import Groups
from rltrain.algorithms.advantages.per_token import discounted_sums, whitened


def reinforce_pp(inputs: AdvantageInputs) -> Advantages:
    """``G_t = sum over k of gamma^k r_(t+k)``, whitened over all masked tokens of the step (arXiv:
    2501.03262). The KL is in the rewards: ``kl.where=reward``. Nothing is compared within a group.
    """
    returns = discounted_sums(inputs.token_rewards[inputs.mask], inputs.gamma, inputs.owner)
    return Advantages(inputs.at_mask(whitened(returns)))


def reinforce_pp_baseline(inputs: AdvantageInputs) -> Advantages:
    """``r_i - mean(r)`` over a group, given to every token, then whitened over all masked tokens of
    the step (arXiv:2501.03262). Whitening takes the step's mean, too, which is 0 over responses but
    not over tokens: a group of equal rewards, or of one response, may end slightly off 0.
    """
    centered = Groups.of(inputs).centered(inputs.scores)
    return Advantages(inputs.at_mask(whitened(centered[inputs.owner])))
