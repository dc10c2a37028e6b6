"""How far two passes of one model over the same tokens may lie apart, by precision and routing.

With d the difference of a token's log-probabilities: at most half of the tokens may have |d| above
``half``, and at most a share ``tail_share`` above ``tail``. No single token decides: one flipped
expert moves a token of a healthy run as far as it likes, and the more tokens, the farther. The
numbers are derived in docs/algorithms.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rltrain.config import Config

Precision = Literal["fp32", "bf16", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8")
"""From the finest to the coarsest."""

FALSE_ALARM = 1e-6
"""Probability that a run at the very bound fails by chance, were its tokens independent."""


@dataclass(frozen=True)
class Bound:
    half: float
    tail: float
    tail_share: float = 0.01

    def holds(self, above: Callable[[float], float], num_tokens: int) -> bool:
        """Whether the number of tokens ``above`` each distance may be chance, out of so many."""
        shares = zip(self.distances, (0.5, self.tail_share), strict=True)
        return not any(is_more_than(share, above(x), num_tokens) for x, share in shares)

    @property
    def distances(self) -> tuple[float, float]:
        return self.half, self.tail

    def __str__(self) -> str:
        return (
            f"at most half of the tokens above {self.half:g}, "
            f"{100 * self.tail_share:g} % above {self.tail:g}"
        )


SAME_EXPERTS: dict[Precision, Bound] = {
    "fp32": Bound(1e-4, 1e-3, tail_share=1e-3),
    "bf16": Bound(0.01, 0.1),
    "fp8": Bound(0.1, 0.4),
}
"""Where both passes use the same experts, by replay or because there are none."""

OWN_EXPERTS: dict[Precision, Bound] = {
    "fp32": Bound(1e-3, 0.01),
    "bf16": Bound(0.03, 0.5),
    "fp8": Bound(0.2, 2.0),
}
"""Where each pass chooses its experts: near-ties flip, and what follows a flip moves, too."""


def bound_for(precision: Precision, *, same_experts: bool) -> Bound:
    return (SAME_EXPERTS if same_experts else OWN_EXPERTS)[precision]


def is_more_than(share: float, count: float, total: int) -> bool:
    """Whether ``count`` of ``total`` is above ``share`` beyond chance.

    By Chernoff's bound on the binomial tail: with q = count / total above the share, as many or
    more come with a probability of at most ``exp(-total * KL(q || share))``.
    """
    q = count / total if total else 0.0
    if q <= share:
        return False
    kl = q * math.log(q / share)
    if q < 1:
        kl += (1 - q) * math.log((1 - q) / (1 - share))
    return total * kl > -math.log(FALSE_ALARM)


def count_above(distances: Tensor) -> Callable[[float], float]:
    """How many of ``distances`` are above a number; what is not a number is.  # [n]"""
    return lambda bound: float((~(distances <= bound)).sum())


def trainer_precision(config: Config, device: str) -> Precision:
    """Of what the policy multiplies in; on GPUs fp32 is TF32 in some kernels, and bf16's bounds
    are the next."""
    if config.policy.megatron_args.get("fp8"):
        return "fp8"
    params = config.policy.precision.params
    return "fp32" if device == "cpu" and params != "bf16" else "bf16"


def engine_precision(config: Config, device: str) -> Precision:
    """Of the coarsest that the engine computes with: matrices or KV cache."""
    rollout = config.rollout
    cache = str(rollout.engine_args.get("kv_cache_dtype", "auto"))
    if rollout.quantization == "fp8" or cache.startswith("fp8"):
        return "fp8"
    return "fp32" if device == "cpu" and rollout.dtype == "float32" else "bf16"


def coarsest(*precisions: Precision) -> Precision:
    return max(precisions, key=PRECISIONS.index)
