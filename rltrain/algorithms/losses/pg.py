"""Plain policy gradient."""

from rltrain.algorithms.losses.loss_inputs import LossInputs, TokenLoss


def pg(inputs: LossInputs) -> TokenLoss:
    """``-A log pi`` (REINFORCE): no ratio and no clip, right for one update a step. The ratio is
    logged all the same: away from 1 it tells how far off policy the gradient is.
    """
    return TokenLoss(-inputs.advantages * inputs.logprobs, inputs.log_ratio.detach().exp())
