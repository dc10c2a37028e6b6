"""Systematic faults are found at a tenth of their size, on every axis. Rounding never fails."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rltrain.routing.margin_gate import CLUSTER, HEALTHY_SHARE, STEPS, fails, log_limit, systematic
from rltrain.routing.noise import WIDE
from tests.unit.routing.gate_case import Step, faults, flips_of

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax, 8 of 32": {},
    "softmax, 1 of 32": {"k": 1},
    "softmax, 2 of 8": {"experts": 8, "k": 2},
    "sigmoid, bias, 4 of 8 groups, 8 of 64": {"experts": 64, "sigmoid": True, "groups": (8, 4)},
}
NOISE = {"fp32": 1e-6, "bf16": 0.015, "fp8": 0.08}
"""Scale over the spread of the logits. bf16: route-noise-cpu-2026-11-29.json of RESULTS; FP8 is
taken to be five times that (ADR 18)."""


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("router", ROUTERS)
def test_a_tenth_of_every_fault_is_found_and_rounding_is_not(router: str, noise: str) -> None:
    step = Step(**ROUTERS[router], noise=NOISE[noise])
    flips, _, found = step.judge(step.routes)
    assert found == [] and len(flips.rows) < 1e-4 * step.layers * len(step.tokens)
    for name, where, routes in faults(step):
        _, _, found = step.judge(routes.view(step.routes.shape))
        assert found, f"{name}: nothing found"
        assert re.search(where, found[0].where), (name, found[:3])


# False alarms

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
MEASURED = sorted(RESULTS.glob("route-noise-*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_noise_is_far_within_what_the_gate_takes_for_healthy(path: Path) -> None:
    """Where none of n was wide, their share is below 3 / n with 95 % confidence."""
    measured = json.loads(path.read_text())["measured"]
    engines = {name: found for name, found in measured.items() if name.startswith("engine")}
    assert engines
    for name, found in engines.items():
        trials = found["rows"] * len(found["layers"])
        wide = found["wide"][str(WIDE)]["fraction"]
        assert wide + 3 / trials < HEALTHY_SHARE / 2, name


# Cells of an axis, rows of each, least share: of a step of 64 samples of 500 rows, 48 layers.
AXES = {
    "step": (1, 32_000 * 48, 0.005),
    "layer": (48, 32_000, 0.005),
    "layer and column": (384, 32_000, 0.005),
    "layer and expert": (6144, 2000, 0.25),
    "sample": (64, 500 * 48, 0.25),
    "sample and layer": (3072, 500, 0.25),
    "part": (16, 2000 * 48, 0.05),
    "part and layer": (768, 2000, 0.05),
    "edge row": (32, 64 * 48, 0.25),
    "period": (2079, 512 * 48, 0.25),
    "short samples and layers": (3072, 30, 0.25),
}


@pytest.mark.parametrize("axis", AXES)
def test_ten_thousand_healthy_steps_raise_no_alarm(axis: str) -> None:
    """At the worst share that counts as healthy, in clusters, as over-dispersed as is allowed for.

    All cells together may fail once in 100,000 steps; up to 500 of an axis are simulated.
    """
    cells, size, least_share = AXES[axis]
    draw = np.random.default_rng(0)
    sizes = np.full(min(cells, 500), size)
    limit = log_limit(cells)
    for _ in range(10):
        clusters = draw.poisson(size * HEALTHY_SHARE / CLUSTER, (STEPS // 10, len(sizes)))
        counts = clusters * CLUSTER
        assert not fails(counts, counts, sizes, least_share, limit).any()
    # It is no gate that never closes: at its least share, or a few rows more, every axis fails.
    enough = np.maximum(np.ceil(1.1 * least_share * sizes), 20 * CLUSTER).astype(np.int64)
    assert fails(enough, enough, np.maximum(sizes, enough), least_share, limit).all()


@pytest.mark.parametrize("seed", range(3))
def test_heavy_tails_are_no_fault(seed: int) -> None:
    """Student's t with 5 degrees of freedom, and one token in twenty five times as noisy."""
    step = Step(seed=seed)
    draw = torch.Generator().manual_seed(seed)
    shape = step.logits.shape
    chi = torch.randn(5, *shape, generator=draw).square().mean(0).sqrt()
    scale = torch.where(torch.rand(1, shape[1], 1, generator=draw) < 0.05, 5.0, 1.0)
    noise = 0.015 * scale * torch.randn(shape, generator=draw) / chi
    step.moved = step.logits + noise
    assert step.judge(step.routes)[2] == []


def test_one_prefix_that_all_samples_share_is_one_event() -> None:
    """A template's rows are the same computation in every sample: rounding moves all alike."""
    step = Step()
    step.tokens.view(64, 41)[:, :20] = torch.arange(20)
    _, case, _ = step.judge(step.routes)
    starts = np.arange(64) * 41
    everywhere = flips_of(starts + 7, np.ones(64, dtype=np.int64))
    assert systematic(everywhere, case) == []
    every_layer = flips_of(
        np.concatenate([starts + 30] * 3), np.repeat(np.arange(3), 64)
    )  # rows with other prefixes
    assert systematic(every_layer, case)


def test_rows_behind_a_missing_one_are_not_judged() -> None:
    step = Step()
    routes = step.by_sample()
    routes[17] = routes[18].clone()
    step.mask[17 * 41] = False
    assert step.judge(routes.view(step.routes.shape))[2] == []


def test_a_step_without_rows_is_healthy() -> None:
    step = Step()
    step.mask[:] = False
    assert step.judge(step.routes)[2] == []
