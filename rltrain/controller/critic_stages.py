"""What the controller computes of the critic's values and updates. Pure."""

from collections.abc import Sequence

from torch import Tensor

from rltrain.batch import Batch
from rltrain.policy.types import Updated


def value_metrics(batch: Batch, updates: Sequence[Updated]) -> dict[str, float]:
    """The ``value/`` metrics of a step: of its loss tokens, with the values that its advantages
    were made of, and of its critic's updates.

    Args:
        batch: with ``values``, ``returns`` and ``loss_weights``
    """
    metrics: dict[str, float] = {}
    values, returns, weights = batch.require("values", "returns", "loss_weights")
    counted = weights != 0
    if counted.any():
        values, returns = values[counted].double(), returns[counted].double()
        metrics = {"value/mean": float(values.mean()), "value/return_mean": float(returns.mean())}
        metrics |= _named("value/explained_variance", explained_variance(values, returns))
    if updates:
        clipped, tokens = (sum(u.totals[name] for u in updates) for name in ("clipped", "tokens"))
        metrics |= {
            "value/loss": sum(u.totals["loss"] for u in updates) / len(updates),
            "value/clip_fraction": clipped / max(1.0, tokens),
            "value/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
            "value/lr": updates[-1].lr,
        }
    return metrics


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """``1 - Var[R - V] / Var[R]`` (openai/baselines ``common/math_util.py``): 1 for perfect values,
    0 for constant ones. None where every return is the same: nothing is there to explain.

    Args:
        values, returns: of the tokens that count  # [n] each
    """
    if not len(returns) or bool((returns == returns[0]).all()):
        return None
    errors = (returns.double() - values.double()).var(unbiased=False)
    return 1 - float(errors / returns.double().var(unbiased=False))


def _named(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
