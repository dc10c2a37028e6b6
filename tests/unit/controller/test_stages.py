"""What the controller makes of the workers' sums."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rltrain.batch import Batch, RouteRef
from rltrain.config.routing import RoutingReplayConfig
from rltrain.controller.stages import check_overlap, with_fallback, without_older_routes
from rltrain.controller.step_metrics import (
    link_metrics,
    load_metrics,
    mismatch_over_entropy,
    overlap_metrics,
    rollout_metrics,
)
from rltrain.policy.types import NO_FLIP, Agreement


def test_overlap_is_a_mean_over_captured_rows() -> None:
    """Two rows of K = 2: three of four experts shared in layer 0, two of four in layer 3."""
    agreement = Agreement(
        num_rows=2,
        shared={0: 3, 3: 2},
        gate_mass={0: 1.8, 3: 1.0},
        part_rows=(1, 0, 1, 0),
        part_shared=(4, 0, 1, 0),
        flipped=torch.zeros(3, dtype=torch.bool),
        first_flip=torch.tensor([NO_FLIP, 3, NO_FLIP]),
    )
    assert overlap_metrics(agreement, experts_per_token=2) == {
        "routing/overlap": pytest.approx(0.625),
        "routing/overlap_min": 0.5,
        "routing/overlap/layer_0": 0.75,
        "routing/overlap/layer_3": 0.5,
        "routing/overlap/part_0": 1.0,
        "routing/overlap/part_2": 0.25,
        "routing/gate_mass": pytest.approx(0.7),
        "routing/gate_mass/layer_0": 0.9,
        "routing/gate_mass/layer_3": 0.5,
        "routing/differing_row_fraction": 0.5,
        "routing/first_differing_layer": 3.0,
    }


def test_no_overlap_without_captured_rows() -> None:
    agreement = Agreement(
        num_rows=0,
        shared={0: 0},
        gate_mass={0: 0.0},
        part_rows=(0,) * 4,
        part_shared=(0,) * 4,
        flipped=torch.zeros(3, dtype=torch.bool),
        first_flip=torch.full((3,), NO_FLIP),
    )
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


def test_replay_without_routes_is_an_error() -> None:
    batch = replace(batch_missing(), route_mask=None)
    with pytest.raises(ValueError, match="the batch has no route_mask"):
        fall_back(batch, fallback="live")


def test_a_failed_reward_stays_out_of_the_loss() -> None:
    batch = batch_missing(3, 7)  # the second sample's costs nothing
    (loss_mask,) = batch.require("loss_mask")
    loss_mask = loss_mask.clone()
    loss_mask[6:] = False
    left, metrics = fall_back(replace(batch, loss_mask=loss_mask), fallback="drop")
    assert left == [2, 3]
    assert metrics["routing/fallback_dropped_fraction"] == 2 / 4


def test_coverage_is_of_the_rows_that_owe_a_route() -> None:
    batch = batch_missing(3, 6).with_fields(
        rollout_expert_indices=((route_ref(5),), (route_ref(2), route_ref(1)))
    )
    metrics = rollout_metrics(batch)
    assert metrics["routing/coverage"] == 6 / 8
    assert metrics["routing/bytes_per_token"] == 3 * 2 * 2
    assert metrics["routing/host_bytes"] == (5 + 3) * 3 * 2 * 2


def test_what_routes_cost_the_links_is_said_of_routes_alone() -> None:
    batch = batch_missing(3).with_fields(
        rollout_expert_indices=((route_ref(5),), (route_ref(2), route_ref(1)))
    )
    links = {("10.0.0.1", "10.0.0.2"): 100, ("10.0.0.1", "10.0.0.3"): 23}
    assert link_metrics(batch, links) == {"routing/bytes_between_nodes": 123.0}
    assert link_metrics(batch, {}) == {"routing/bytes_between_nodes": 0.0}
    assert link_metrics(batch.with_fields(rollout_expert_indices=None), {}) == {}


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
        token_checksum=0,
        blocks=(None,),
        weight_version=0,
        producer="vLLM 0.30.0",
    )


def agreement(**shared: int) -> Agreement:
    """Five rows of K = 2, so ten experts a layer; ``shared`` by layer."""
    none = torch.zeros(0)
    by_layer = {int(name.removeprefix("layer_")): count for name, count in shared.items()}
    return Agreement(5, by_layer, {}, (), (), flipped=none, first_flip=none)


def test_the_gate_opens_at_its_bound_and_names_the_first_layer_below() -> None:
    check_overlap(agreement(layer_0=10, layer_3=7), 2, 8, min_overlap=0.7)
    with pytest.raises(RuntimeError) as error:
        check_overlap(agreement(layer_0=10, layer_3=6, layer_4=0), 2, 8, min_overlap=0.7)
    assert str(error.value) == (
        "layer 3: native routing shares 0.600 of the experts that were captured in the rollout, "
        "expected routing_replay.min_overlap=0.7 or more (chance is 0.250). The routes are not "
        "those of these tokens, this layer or these weights [RL5002]"
    )


def test_the_gate_has_nothing_to_say_of_no_rows_or_no_layers() -> None:
    check_overlap(replace(agreement(layer_1=0), num_rows=0), 2, 8, min_overlap=1.0)
    check_overlap(agreement(), 2, 8, min_overlap=1.0)


def test_load_is_told_as_what_it_is_above_an_even_share() -> None:
    """Twelve rows over four experts: 6, 3, 3 and none, and an even layer."""
    load = {1: torch.tensor([6, 3, 3, 0]), 4: torch.tensor([3, 3, 3, 3])}
    assert load_metrics(load) == {
        "routing/load_max": 1.0,
        "routing/load_min": -1.0,
        "routing/load_mean": 0.25,
        "routing/load_max/layer_1": 1.0,
        "routing/load_max/layer_4": 0.0,
    }
    assert load_metrics({0: torch.zeros(4, dtype=torch.int64)}) == {}


def test_mismatch_is_told_in_units_of_entropy() -> None:
    both = {"mismatch/k3": 1e-4, "policy/entropy": 0.5}
    assert mismatch_over_entropy(both) == {"policy/mismatch_over_entropy": 2e-4}
    assert mismatch_over_entropy({"mismatch/k3": 1e-4}) == {}


def test_a_row_is_as_old_as_the_token_that_it_sampled() -> None:
    """A prompt of 2 with a response of 3 that saw an update after its first token, and one of 1 and
    2 without."""
    batch = Batch(
        tokens=torch.arange(8),
        seq_lens=torch.tensor([5, 3]),
        response_mask=torch.tensor([0, 0, 1, 1, 1, 0, 1, 1]).bool(),
        route_mask=torch.tensor([1, 1, 1, 1, 0, 1, 0, 0]).bool(),  # one row is missing
    )
    ages = torch.tensor([2, 2, 2, 1, 1, 0, 0, 0])
    for max_age, kept, older in (
        (2, [1, 1, 1, 1, 0, 1, 0, 0], 0),
        (1, [0, 0, 1, 1, 0, 1, 0, 0], 2 / 5),
        (0, [0, 0, 0, 0, 0, 1, 0, 0], 4 / 5),
    ):
        found, metrics = without_older_routes(batch, ages, max_age)
        assert found.route_mask is not None
        assert found.route_mask.tolist() == [bool(row) for row in kept]
        assert metrics == {"routing/older_fraction": pytest.approx(older)}
