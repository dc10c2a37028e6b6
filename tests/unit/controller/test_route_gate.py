"""The controller on wide flips: limits, metrics, and a message that says where they are."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.checks.route_gate import (
    flip_metrics,
    narrow_bins,
    noise_scales,
    wrong_routes,
)
from rltrain.controller.loop import Trainer
from rltrain.policy.types import Agreement
from rltrain.routing.flips import LayerFlips, WideFlips, join_flips, sum_flips

B, T, K, E = 64, 41, 2, 8
LAYERS = (1, 3)


def batch() -> Batch:
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[:, -1] = False
    return Batch(
        tokens=torch.randint(1000, (B * T,), generator=torch.Generator().manual_seed(0)),
        seq_lens=torch.full((B,), T),
        response_mask=torch.ones(B * T, dtype=torch.bool),
        route_mask=mask.flatten(),
    )


def agreement() -> Agreement:
    rows = B * (T - 1)
    runners_up = torch.zeros(256, dtype=torch.int64)
    runners_up[80] = rows  # none was given: no noise
    flips = LayerFlips(runners_up, spread=1.0 * rows, uses=torch.full((E,), rows * K // E))
    none = torch.zeros(0)
    return Agreement(
        rows,
        dict.fromkeys(LAYERS, rows * K),
        {},
        (),
        (),
        flipped=none,
        first_flip=none,
        num_judged=rows,
        flips=dict.fromkeys(LAYERS, flips),
    )


def wide(sample: int, layers: tuple[int, ...] = LAYERS) -> WideFlips:
    rows = np.arange(sample * T + 2, (sample + 1) * T - 1)
    count = len(rows)
    return join_flips(
        [
            WideFlips(rows, np.full(count, n), np.full(count, 1), np.arange(count) % E)
            for n in reversed(layers)
        ]
    )


def test_the_message_says_which_sample_layers_and_row() -> None:
    found = wrong_routes(batch(), agreement(), wide(17), K)
    assert found is not None
    assert re.search(r"wrong\. sample 17 of 64: in 95\.0% of the routes there", found)
    assert "Layers: 1, 3. The first: sample 17, row 2, layer 1, column 1, expert 0." in found


def test_a_healthy_step_has_no_message() -> None:
    nothing = join_flips([WideFlips(*[np.zeros(0, dtype=np.int64)] * 4)])
    assert wrong_routes(batch(), agreement(), nothing, K) is None
    few = wide(17)
    few = WideFlips(*(getattr(few, name)[:4] for name in ("rows", "layers", "columns", "experts")))
    assert wrong_routes(batch(), agreement(), few, K) is None


def test_metrics_are_shares_of_judged_rows_by_layer() -> None:
    found = flip_metrics(agreement(), noise_scales(agreement()), wide(17, (3,)))
    rows = B * (T - 1)
    assert found["routing/wide_flip_fraction/layer_1"] == 0.0
    assert found["routing/wide_flip_fraction/layer_3"] == pytest.approx(38 / rows)
    assert found["routing/wide_flip_fraction"] == pytest.approx(19 / rows)
    assert found["routing/judged_fraction"] == 1.0
    assert {"routing/flip_noise/layer_1", "routing/flip_noise/layer_3"} <= set(found)


def test_sums_over_ranks_are_those_of_one() -> None:
    """Two shards that are alike: the noise is the same, and so are the limits."""
    one = agreement()
    two = sum_flips([one.flips[1], one.flips[1]])
    assert two.spread == 2 * one.flips[1].spread
    assert torch.equal(two.runners_up, 2 * one.flips[1].runners_up)
    assert torch.equal(two.uses, 2 * one.flips[1].uses)
    assert narrow_bins(one, noise_scales(one)).keys() == set(LAYERS)


# The trainer, without workers


def trainer(flips: WideFlips, **replay: str) -> Trainer:
    found: Trainer = object.__new__(Trainer)
    found.config = Config.model_validate({"routing_replay": replay})
    found.arch = SimpleNamespace(experts_per_token=K)  # type: ignore[assignment]
    found.policy = SimpleNamespace(wide_flips=lambda narrow: flips)  # type: ignore[assignment]
    return found


def test_wrong_routes_end_a_run_that_replays_them() -> None:
    with pytest.raises(RuntimeError, match=r"sample 17 of 64.*routing_replay\.gate=warn"):
        trainer(wide(17), mode="r3").check_route_margins(batch(), agreement(), is_fresh=True)


def test_or_are_logged_where_the_run_is_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    found = trainer(wide(17), mode="r3", gate="warn").check_route_margins(
        batch(), agreement(), is_fresh=True
    )
    assert "sample 17 of 64" in caplog.text
    assert found["routing/wide_flip_fraction"] > 0


@pytest.mark.parametrize("mode", ["off", "r2"])
def test_routes_that_are_not_replayed_are_measured_alone(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = trainer(wide(17), mode=mode).check_route_margins(batch(), agreement(), is_fresh=True)
    assert found["routing/wide_flip_fraction"] > 0 and not caplog.text


def test_routes_of_older_weights_are_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    found = trainer(wide(17), mode="r3").check_route_margins(batch(), agreement(), is_fresh=False)
    assert found["routing/wide_flip_fraction"] > 0 and not caplog.text
