"""What the controller makes of the workers' sums."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rltrain.batch import Batch, RouteRef
from rltrain.config.routing import RoutingReplayConfig
from rltrain.controller.stages import overlap_metrics, rollout_metrics, with_fallback
from rltrain.policy.types import Agreement


def test_overlap_is_a_mean_over_captured_rows() -> None:
    """Two rows of K = 2: three of four experts shared in layer 0, two of four in layer 3."""
    agreement = Agreement(num_rows=2, shared={0: 3, 3: 2}, flipped=torch.zeros(3, dtype=torch.bool))
    assert overlap_metrics(agreement, experts_per_token=2) == {
        "routing/overlap": pytest.approx(0.625),
        "routing/overlap_min": 0.5,
        "routing/overlap/layer_0": 0.75,
        "routing/overlap/layer_3": 0.5,
    }


def test_no_overlap_without_captured_rows() -> None:
    agreement = Agreement(num_rows=0, shared={0: 0}, flipped=torch.zeros(3, dtype=torch.bool))
    assert overlap_metrics(agreement, experts_per_token=2) == {}


SAMPLES = ["prompt a sample 0", "prompt a sample 1"]


def batch_missing(*rows: int) -> Batch:
    """A prompt of 2 with a response of 4, one of 1 with 3; the routes of ``rows`` are missing."""
    route_mask = torch.tensor([True] * 5 + [False] + [True] * 3 + [False])
    route_mask[list(rows)] = False
    response = torch.tensor([False] * 2 + [True] * 4 + [False] + [True] * 3)
    return Batch(
        tokens=torch.arange(10),
        seq_lens=torch.tensor([6, 4]),
        response_mask=response,
        loss_mask=response,
        route_mask=route_mask,
    )


def fall_back(batch: Batch, **keys: Any) -> tuple[list[int], dict[str, float]]:
    """The tokens left in the loss, and the metrics."""
    replay = RoutingReplayConfig.model_validate(
        {"mode": "r3", "max_sample_fallback": 0.5, "max_batch_fallback": 1.0} | keys
    )
    batch, metrics = with_fallback(batch, replay, SAMPLES)
    (loss_mask,) = batch.require("loss_mask")
    return loss_mask.nonzero().flatten().tolist(), metrics


def test_nothing_missing_changes_nothing() -> None:
    left, metrics = fall_back(batch_missing(), fallback="error", max_batch_fallback=0.0)
    assert left == [2, 3, 4, 5, 7, 8, 9]
    assert set(metrics.values()) == {0.0}


def test_a_missing_row_costs_what_the_policy_says() -> None:
    batch = batch_missing(3)
    for fallback in ("live", "r2"):
        left, metrics = fall_back(batch, fallback=fallback)
        assert left == [2, 3, 4, 5, 7, 8, 9]
        assert metrics["routing/fallback_fraction"] == 1 / 8
        assert metrics["routing/fallback_dropped_fraction"] == 0.0
    left, metrics = fall_back(batch, fallback="drop")
    assert left == [2, 3, 7, 8, 9]
    assert metrics["routing/fallback_dropped_fraction"] == 2 / 7
    with pytest.raises(ValueError, match="prompt a sample 0, row 3"):
        fall_back(batch, fallback="error")


def test_a_sample_above_its_budget_leaves_the_loss_whole() -> None:
    left, metrics = fall_back(batch_missing(3, 6, 7), fallback="live")
    assert left == [2, 3, 4, 5]
    assert metrics["routing/fallback_dropped_fraction"] == 3 / 7
    assert fall_back(batch_missing(3, 6, 7), fallback="live", max_sample_fallback=2 / 3)[0][-1] == 9


def test_a_step_above_its_budget_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="Worst: prompt a sample 1"):
        fall_back(batch_missing(6), fallback="drop", max_batch_fallback=0.1)
    fall_back(batch_missing(6), fallback="drop", max_batch_fallback=0.125)


def test_a_failed_reward_stays_out_of_the_loss() -> None:
    batch = batch_missing(3)
    (loss_mask,) = batch.require("loss_mask")
    loss_mask = loss_mask.clone()
    loss_mask[6:] = False
    left, metrics = fall_back(replace(batch, loss_mask=loss_mask), fallback="drop")
    assert left == [2, 3]
    assert metrics["routing/fallback_dropped_fraction"] == 2 / 4


def test_coverage_is_of_the_rows_that_owe_a_route() -> None:
    batch = batch_missing(3, 6).with_fields(rollout_expert_indices=(route_ref(5), route_ref(3)))
    metrics = rollout_metrics(batch, num_truncated=0)
    assert metrics["routing/coverage"] == 6 / 8
    assert metrics["routing/bytes_per_token"] == 3 * 2 * 2


def route_ref(rows: int) -> RouteRef:
    return RouteRef(
        start_row=0,
        rows=rows,
        layers=(1, 2, 5),
        experts_per_token=2,
        num_experts=512,
        dtype="int16",
        block_sizes=(3,),
        checksums=(0,),
        blocks=(None,),
        weight_version=0,
        producer="vLLM 0.30.0",
    )
