"""Plain policy gradient."""

from rltrain.algorithms.losses.loss_inputs import LossInputs, TokenLoss


def pg(inputs: LossInputs) -> TokenLoss:
    """``-A log pi`` (REINFORCE), without ratio and clip. Use it with one update per step. The ratio
    is still logged: its distance from 1 shows how off-policy the gradient is.
    """
    return TokenLoss(-inputs.advantages * inputs.logprobs, inputs.log_ratio.detach().exp())
