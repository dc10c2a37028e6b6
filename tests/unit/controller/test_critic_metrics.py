"""The critic's metrics against numpy."""

import numpy as np
import pytest
import torch

from rltrain.batch import Batch
from rltrain.controller.step_metrics import explained_variance, value_metrics
from rltrain.policy.types import Updated
from rltrain.tracking.metrics import METRICS, find_metric

VALUES = torch.tensor([0.0, 0.5, -1.0, 9.0, 0.0, 2.0, 1.0])
RETURNS = torch.tensor([0.0, 1.0, -2.0, 5.0, 0.0, 2.5, 1.0])
WEIGHTS = torch.tensor([0.0, 0.1, 0.4, 0.0, 0.0, 0.2, 0.3])  # what counts is whether, not how much


def batch_of(returns: torch.Tensor = RETURNS, weights: torch.Tensor = WEIGHTS) -> Batch:
    return Batch(
        tokens=torch.zeros(7, dtype=torch.int64),
        seq_lens=torch.tensor([4, 3]),
        response_mask=torch.ones(7, dtype=torch.bool),
        values=VALUES,
        returns=returns,
        loss_weights=weights,
    )


def updated(loss: float, tokens: float, clipped: float, grad_norm: float, lr: float) -> Updated:
    return Updated({"loss": loss, "tokens": tokens, "clipped": clipped}, {}, grad_norm, lr)


def test_of_loss_tokens_and_updates() -> None:
    updates = [updated(1.0, 1, 1, 4.0, 1e-3), updated(2.0, 3, 0, 2.0, 1e-4)]
    v, r = np.array([0.5, -1, 2, 1]), np.array([1, -2, 2.5, 1])
    found = value_metrics(batch_of(), updates)
    assert found == pytest.approx(
        {
            "value/mean": v.mean(),
            "value/return_mean": r.mean(),
            "value/explained_variance": 1 - (r - v).var() / r.var(),
            "value/loss": 1.5,
            "value/clip_fraction": 1 / 4,
            "value/grad_norm": 3.0,
            "value/lr": 1e-4,
        }
    )
    assert found.keys() <= {metric.name for metric in METRICS}


def test_values_are_measured_where_the_catalogue_says() -> None:
    """Tokens that a correction, a limit or a failed reward took out of the loss do not count."""
    names = ["value/mean", "value/return_mean", "value/explained_variance"]
    assert {find_metric(name).denominator for name in names} == {"tokens in the loss"}
    outside = torch.where(WEIGHTS == 0, 1e6, 0.0)
    moved = batch_of().with_fields(values=VALUES + outside, returns=RETURNS - outside)
    found, expected = (value_metrics(batch, []) for batch in (moved, batch_of()))
    assert found == expected and found.keys() == set(names)


def test_what_is_not_defined_is_left_out() -> None:
    constant = value_metrics(batch_of(torch.full((7,), 0.1)), [])
    assert constant.keys() == {"value/mean", "value/return_mean"}
    assert value_metrics(batch_of(weights=torch.zeros(7)), []) == {}


def test_explained_variance() -> None:
    assert explained_variance(RETURNS, RETURNS) == 1
    # A constant shift of the values is no error here, and constant values explain nothing.
    assert explained_variance(RETURNS + 3, RETURNS) == pytest.approx(1)
    assert explained_variance(torch.full((7,), 0.1), RETURNS) == pytest.approx(0)
    assert explained_variance(-RETURNS, RETURNS) == pytest.approx(-3)
    assert explained_variance(torch.zeros(0), torch.zeros(0)) is None
    assert explained_variance(torch.zeros(1), torch.ones(1)) is None
