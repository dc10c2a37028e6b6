"""How far the trainer's log-probabilities are from the ones the rollout engine sampled with.

With d = log pi_train - log pi_rollout of a sampled token, clamped to [-20, 20] so that one
hopeless token cannot overflow the exponentials. Pure torch, no gradient, float64.
"""

import torch
from torch import Tensor

CLAMP = 20.0


@torch.no_grad()
def mismatch_metrics(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    flipped: Tensor | None = None,
    *,
    area: str = "mismatch",
) -> dict[str, float]:
    """The ``mismatch/`` metrics of one batch, named under ``area``.

    Args:
        logprobs: the trainer's, of each token.  # [N]
        rollout_logprobs: the engine's, at sampling.  # [N]
        mask: bool, True on the response tokens to compare.  # [N]
        flipped: bool, True where a route flip can reach the token's log-probability; None where
            it was not measured, which leaves its metrics out.  # [N]

    Returns:
        k1, k3, abs_diff_mean, abs_diff_max, mult_prob_error, num_tokens; with ``flipped`` also
        num_flipped and, unless that is 0, abs_diff_median_flipped.

    Raises:
        ValueError: shapes that differ, an empty mask, or a NaN or infinity under the mask.
    """
    _check(logprobs, rollout_logprobs, mask, flipped)
    diff = (logprobs.double() - rollout_logprobs.double())[mask].clamp(-CLAMP, CLAMP)
    distance = diff.abs()
    values = {
        "k1": -diff.mean(),
        "k3": (diff.expm1() - diff).mean(),
        "abs_diff_mean": distance.mean(),
        "abs_diff_max": distance.max(),
        "mult_prob_error": distance.exp().mean(),
        "num_tokens": mask.sum(),
    }
    if flipped is not None:
        reached = distance[flipped[mask]]
        values["num_flipped"] = torch.tensor(len(reached))
        if len(reached):
            values["abs_diff_median_flipped"] = _median(reached)
    return {f"{area}/{name}": float(value) for name, value in values.items()}


def _median(values: Tensor) -> Tensor:
    """The mean of the two middle values where the count is even, which torch.median is not."""
    ordered, middle = values.sort().values, len(values) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2


def _check(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, flipped: Tensor | None
) -> None:
    named = {"logprobs": logprobs, "rollout_logprobs": rollout_logprobs, "mask": mask}
    if flipped is not None:
        named["flipped"] = flipped
    shapes = {name: tuple(value.shape) for name, value in named.items()}
    if len(set(shapes.values())) > 1 or mask.dim() != 1:
        raise ValueError(f"mismatch metrics need one shape [N] for all, got {shapes}")
    for name in ("mask", "flipped"):
        if name in named and named[name].dtype != torch.bool:
            raise ValueError(f"{name}: expected bool, found {named[name].dtype}")
    if not bool(mask.any()):
        raise ValueError("mismatch metrics need at least one response token: the mask is all False")
    for name in ("logprobs", "rollout_logprobs"):
        bad = (mask & ~named[name].isfinite()).nonzero()
        if len(bad):
            token = int(bad[0])
            raise ValueError(
                f"{name}[{token}] is {named[name][token].item()}, expected a finite number "
                f"({len(bad)} of {int(mask.sum())} response tokens are not): look for overflow in "
                "the model that computed them"
            )
