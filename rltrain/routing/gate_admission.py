"""Which of a token's replayed experts are kept: those that the router still gives some weight.

Weights that have moved since the rollout may give an expert that was chosen then hardly any gate
now. Replaying it would train an expert that the policy no longer uses for this token.
"""

import torch
from torch import Tensor


def admitted(gates: Tensor, replayed: Tensor, native: Tensor, ratio: float) -> Tensor:
    """The replayed experts whose gate is at least ``ratio`` times the smallest gate of the router's
    own choice, and in place of each other one the best of that choice that is not there already.

    With a ratio of 0 these are the replayed experts. With 1 they are the router's own, but for
    equal gates.

    Args:
        gates: of all experts, not negative  # [S, E]
        replayed: those of the rollout  # [S, K]
        native: the router's own choice  # [S, K]

    Returns:
        In the order of ``replayed`` where all are kept  # [S, K]
    """
    weakest = gates.gather(1, native).amin(1, keepdim=True)
    kept = gates.gather(1, replayed) >= ratio * weakest
    # Kept ones come first, and then the best of the native choice.
    rank = torch.full_like(gates, -1.0).scatter(1, native, gates.gather(1, native))
    bonus = torch.zeros_like(gates).scatter_add(1, replayed, kept.to(gates.dtype))
    rank = torch.where(bonus > 0, gates.amax() + 1 + gates, rank)
    chosen = rank.topk(replayed.shape[1]).indices
    return torch.where(kept.all(1, keepdim=True), replayed, chosen)
