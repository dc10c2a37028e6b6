"""Estimators of KL(policy || reference) from the sampled token's log-probabilities.

http://joschu.net/blog/kl-approx.html, with ``log r = ref_logprobs - logprobs`` for samples of the
policy: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.
"""

from typing import Literal

import torch
from torch import Tensor

# exp(20) is 5e8: beyond it an estimate is no estimate, and one token would drown the batch.
MAX_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate, differentiable in ``logprobs``.  # [N], [N] -> [N]"""
    log_r = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return log_r.square() / 2
    return torch.exp(log_r) - 1 - log_r
