"""Estimators of KL(policy || reference) from the sampled token's log-probabilities.

http://joschu.net/blog/kl-approx.html, with ``log r = ref_logprobs - logprobs`` for samples of the
policy: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. As a term of a loss only k2 and k3_k2
have the gradient of the KL in expectation (arXiv:2510.01555, section 3): k1's is zero, and k3's is
that of KL(reference || policy).
"""

from typing import Literal

from torch import Tensor

# exp(20) is 5e8. Without the clamp, one token could dominate the whole batch.
MAX_LOG_RATIO = 20.0

Estimator = Literal["k1", "k2", "k3", "k3_k2"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Estimator) -> Tensor:
    """Per-token estimate, differentiable in ``logprobs`` where ``|log r|`` is below 20.

    # [N], [N] -> [N]
    """
    log_r = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -log_r
    k2 = log_r.square() / 2
    if kind == "k2":
        return k2
    k3 = log_r.expm1() - log_r
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def adapted_coef(
    coef: float, kl: float, num_responses: int, *, target: float, horizon: int
) -> float:
    """The next coefficient of an adaptive KL: ``coef (1 + e n / horizon)`` for n new responses, e =
    kl / target - 1 clipped to [-0.2, 0.2] (Ziegler et al., arXiv:1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_responses / horizon)
