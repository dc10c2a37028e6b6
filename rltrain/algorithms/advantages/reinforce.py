"""REINFORCE++: no critic, and one normalization over the whole step instead of one per group."""

from rltrain.algorithms.advantages.advantage_inputs import AdvantageInputs, Advantages
from rltrain.algorithms.advantages.group import Groups
from rltrain.algorithms.advantages.per_token import discounted_sums, whitened


def reinforce_pp(inputs: AdvantageInputs) -> Advantages:
    """``G_t = sum over k of gamma^k r_(t+k)``, whitened over all masked tokens of the step (arXiv:
    2501.03262). Set ``kl.where=reward`` to have the KL in the rewards. Responses of a group are not
    compared."""
    returns = discounted_sums(inputs.token_rewards[inputs.mask], inputs.gamma, inputs.owner)
    return Advantages(inputs.at_mask(whitened(returns)))


def reinforce_pp_baseline(inputs: AdvantageInputs) -> Advantages:
    """``r_i - mean(r)`` over a group, given to every token, then whitened over all masked tokens of
    the step (arXiv:2501.03262). Whitening also subtracts the mean over tokens, which is not 0
    although the mean over responses is. So a group of equal rewards, or of one response, may end
    slightly off 0."""
    centered = Groups.of(inputs).centered(inputs.scores)
    return Advantages(inputs.at_mask(whitened(centered[inputs.owner])))
