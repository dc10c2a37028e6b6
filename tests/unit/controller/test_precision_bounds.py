"""The bounds of two passes over one model: healthy ones of any size keep them, broken ones do not.

Healthy distances are drawn from the quantiles that were measured on an H200 (``RESULT``: a
trained mixture of 24 layers, bf16, 65,536 tokens), with a Pareto tail beyond the largest. Those of
fp32 and FP8 are the same shape at their own size.
"""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rltrain.algorithms.objective import RATIO_STEPS
from rltrain.config import Config
from rltrain.controller.checks.precision_bounds import (
    FALSE_ALARM,
    OWN_EXPERTS,
    PRECISIONS,
    SAME_EXPERTS,
    Bound,
    Precision,
    bound_for,
    coarsest,
    engine_precision,
    is_more_than,
    trainer_precision,
)
from rltrain.main import compose

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks/results/mismatch-h200-2026-11-28.json"
MEASURED = json.loads(RESULT.read_text())["measured"]
TOKENS = 65536
SIZES = (100, 1_000, 10_000, 300_000)

Array = NDArray[np.float64]
CASES = [(precision, same) for precision in PRECISIONS for same in (True, False)]

SCALE: dict[tuple[Precision, bool], float] = {
    # One bit more of mantissa halves the noise: fp32 has 16 more than bf16.
    ("fp32", True): 2.0**-16,
    ("bf16", True): 1.0,
    ("bf16", False): 1.0,
    # By the k3 of FP8 against bf16 (docs/adr/0009): k3 is half the mean square.
    ("fp8", True): math.sqrt(1.7e-3 / 5.4e-5),
    # At most all rows flip, for 13.7 % in bf16, and what they do adds up as a random walk does.
    ("fp8", False): math.sqrt(1 / 0.137),
}


def draw(precision: Precision, same: bool, size: int, seed: int = 0) -> Array:
    """|d| of ``size`` tokens of a healthy run."""
    rng = np.random.default_rng(seed)
    if precision == "fp32" and not same:
        # A near-tie flips 2^16 times less often: a few tokens are as far off as in bf16.
        flipped = rng.random(size) < 0.137 * 24 * 2.0**-16
        return np.where(flipped, draw("bf16", False, size, seed), draw("fp32", True, size, seed))
    return SCALE[precision, same] * shape("replayed" if same else "native", rng.random(size))


@cache
def knots(kind: str) -> tuple[Array, Array]:
    """-log of the share above, and log |d| there; between them the one is linear in the other.

    Measured are the median (of flipped tokens, which all are there), the 99 % quantile and the
    largest. A value at 15 % is what makes the mean the measured one.
    """
    named = ("median_flipped", "p99", "max", "mean")
    path = f"engine params, trainer params/{kind}/mismatch/abs_diff_"
    median, p99, largest, mean = (MEASURED[path + name] for name in named)
    shares = -np.log([1.0, 0.5, 0.15, 0.01, 1 / TOKENS])
    grid = (np.arange(200_000) + 0.5) / 200_000
    low, high = median, p99
    for _ in range(30):
        middle = math.sqrt(low * high)
        values = np.log([median / 100, median, middle, p99, largest])
        found = np.exp(np.interp(-np.log(grid), shares, values)).mean()
        low, high = (middle, high) if found < mean else (low, middle)
    return shares, values


def shape(kind: str, above: Array) -> Array:
    """|d| in bf16 at shares ``above``; a Pareto tail beyond the largest that was measured."""
    shares, values = knots(kind)
    u = -np.log(above)
    slope = (values[-1] - values[-2]) / (shares[-1] - shares[-2])
    beyond = values[-1] + slope * (u - shares[-1])
    return np.asarray(np.exp(np.where(u > shares[-1], beyond, np.interp(u, shares, values))))


def holds(bound: Bound, distances: Array) -> bool:
    return bound.holds(lambda x: float((distances > x).sum()), len(distances))


def test_what_is_drawn_is_what_was_measured() -> None:
    for same, kind in ((True, "replayed"), (False, "native")):
        found = draw("bf16", same, 300_000)
        area = f"engine params, trainer params/{kind}/mismatch"
        for name, share in (("abs_diff_median_flipped", 0.5), ("abs_diff_p99", 0.99)):
            measured = MEASURED[f"{area}/{name}"]
            assert float(np.quantile(found, share)) == pytest.approx(measured, rel=0.03)
        assert found.mean() == pytest.approx(MEASURED[f"{area}/abs_diff_mean"], rel=0.02)
        assert found.std() == pytest.approx(MEASURED[f"{area}/abs_diff_std"], rel=0.15)


@pytest.mark.parametrize(("precision", "same"), CASES)
def test_a_healthy_run_of_any_size_keeps_its_bound(precision: Precision, same: bool) -> None:
    bound = bound_for(precision, same_experts=same)
    for size in SIZES:
        for seed in range(20 if size < 300_000 else 1):
            distances = draw(precision, same, size, seed)
            distances[0] = 20.0  # one hopeless token ends no run
            assert holds(bound, distances)


@pytest.mark.parametrize(("precision", "same"), CASES)
def test_ten_million_tokens_keep_it_too(precision: Precision, same: bool) -> None:
    """By counts: the shares that many draws have, of ten million tokens."""
    distances = draw(precision, same, 300_000)
    shares = {x: float((distances > x).mean()) for x in RATIO_STEPS}
    bound = bound_for(precision, same_experts=same)
    assert bound.holds(lambda x: shares[x] * 1e7, 10_000_000)
    # There is room for twice as many.
    assert all(2 * shares[x] <= s for x, s in ((bound.half, 0.5), (bound.tail, bound.tail_share)))


def policy(seed: int, size: int, temperature: float = 1.0, shift: float = 0.0) -> Array:
    """Log-probabilities of a vocabulary of 64 at ``size`` places; entropy about 1.3 nats."""
    rng = np.random.default_rng(seed)
    logits = 2.4 * rng.normal(size=(size, 64))
    logits += shift * rng.normal(size=logits.shape)
    logits /= temperature
    return np.asarray(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))


def sampled(logprobs: Array) -> tuple[Array, Array]:
    rng = np.random.default_rng(9)
    places = np.arange(len(logprobs))
    tokens = (np.cumsum(np.exp(logprobs), axis=1) > rng.random((len(logprobs), 1))).argmax(axis=1)
    return places, tokens


def fault(kind: str, size: int) -> Array:
    """d of a trainer that is otherwise exact."""
    rollout = policy(0, size)
    at = sampled(rollout)
    if kind == "temperature":  # 0.7 in the engine, forgotten in the trainer
        engine = policy(0, size, temperature=0.7)
        at = sampled(engine)
        return np.asarray(rollout[at] - engine[at])
    if kind == "weights":
        return np.asarray(policy(1, size)[at] - rollout[at])
    if kind == "shifted":  # each token has its neighbour's log-probability
        return np.asarray(np.roll(rollout[at], 1) - rollout[at])
    # Log-probabilities moved by one step of training: k3 0.089, measured (docs/algorithms.md,
    # stale_off, weights one step old).
    return np.random.default_rng(1).normal(-0.089, math.sqrt(2 * 0.089), size)


@pytest.mark.parametrize(("precision", "same"), CASES)
@pytest.mark.parametrize("kind", ["temperature", "weights", "shifted", "stale"])
def test_a_fault_is_found_at_every_precision(kind: str, precision: Precision, same: bool) -> None:
    """From a thousand response tokens on; weights and shifts from a hundred."""
    bound = bound_for(precision, same_experts=same)
    for size in (1_000, 10_000):
        noise = draw(precision, same, size) * np.random.default_rng(3).choice([-1, 1], size)
        assert not holds(bound, np.abs(fault(kind, size) + noise))
    if kind in ("weights", "shifted"):
        assert not holds(bound, np.abs(fault(kind, 100)))


def test_a_part_of_the_batch_that_is_wrong_is_found_where_noise_is_low() -> None:
    """One sequence of 32 with its neighbour's log-probabilities."""
    for precision, same in (("fp32", True), ("fp32", False), ("bf16", True)):
        distances = draw(precision, same, 32 * 400)
        distances[:400] = np.abs(fault("shifted", 400))
        assert not holds(bound_for(precision, same_experts=same), distances)


@given(st.integers(1, 400), st.floats(0.001, 0.6), st.data())
def test_more_than_chance_is_what_the_binomial_says(
    n: int, share: float, data: st.DataObject
) -> None:
    """Never where as many come by chance more often than `FALSE_ALARM`; by exact summation."""
    count = data.draw(st.integers(0, n))
    logs = [
        math.lgamma(n + 1)
        - math.lgamma(k + 1)
        - math.lgamma(n - k + 1)
        + k * math.log(share)
        + (n - k) * math.log1p(-share)
        for k in range(count, n + 1)
    ]
    tail = math.fsum(map(math.exp, logs))
    if is_more_than(share, count, n):
        assert tail < FALSE_ALARM
    elif tail < FALSE_ALARM**2:  # and where they hardly ever do, it says so
        raise AssertionError(f"{count} of {n} at {share}: {tail}")


def test_nothing_is_more_than_nothing() -> None:
    assert not is_more_than(0.01, 0, 0)
    assert is_more_than(0.5, 100, 100)


def test_the_worker_counts_at_every_bound() -> None:
    bounds = (*SAME_EXPERTS.values(), *OWN_EXPERTS.values())
    assert {x for bound in bounds for x in bound.distances} <= set(RATIO_STEPS)


def test_a_coarser_precision_and_free_routing_bound_less() -> None:
    for table in (SAME_EXPERTS, OWN_EXPERTS):
        found = [table[precision].distances for precision in PRECISIONS]
        assert found == sorted(found)
    for precision in PRECISIONS:
        assert SAME_EXPERTS[precision].distances < OWN_EXPERTS[precision].distances


@pytest.mark.parametrize(
    ("values", "device", "trainer", "engine"),
    [
        ({}, "cpu", "fp32", "bf16"),
        ({}, "cuda", "bf16", "bf16"),
        ({"rollout": {"dtype": "float32"}}, "cpu", "fp32", "fp32"),
        ({"rollout": {"quantization": "fp8"}}, "cuda", "bf16", "fp8"),
        ({"rollout": {"engine_args": {"kv_cache_dtype": "fp8_e4m3"}}}, "cuda", "bf16", "fp8"),
        ({"policy": {"megatron_args": {"fp8": "hybrid"}}}, "cuda", "fp8", "bf16"),
        ({"policy": {"precision": {"params": "bf16"}}}, "cpu", "bf16", "bf16"),
        ({"policy": {"precision": {"params": "fp32"}}}, "cuda", "bf16", "bf16"),  # TF32
        ({"rollout": {"dtype": "float32"}}, "cuda", "bf16", "bf16"),
    ],
)
def test_the_precision_of_a_run(values: object, device: str, trainer: str, engine: str) -> None:
    config = Config.model_validate(values)
    assert trainer_precision(config, device) == trainer
    assert engine_precision(config, device) == engine


def test_the_shipped_fp8_option_is_judged_as_fp8() -> None:
    """As its first step on a GPU is: tests/gpu/test_fp8_rollout.py."""
    config = compose(["+recipe=grpo_moe_r3", "rollout=fp8"])
    assert (trainer_precision(config, "cuda"), engine_precision(config, "cuda")) == ("bf16", "fp8")


def test_the_coarsest_decides() -> None:
    assert coarsest("fp32", "bf16") == coarsest("bf16", "fp32") == "bf16"
    assert coarsest("bf16", "fp8") == coarsest("fp8", "fp32") == "fp8"
