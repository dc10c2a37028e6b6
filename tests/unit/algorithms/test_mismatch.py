"""The mismatch metrics against formulas written out again in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.algorithms.mismatch import mismatch_metrics

TOKENS = st.lists(
    st.tuples(
        st.floats(-60, 0, width=32),  # trainer
        st.floats(-60, 0, width=32),  # engine
        st.booleans(),  # response
        st.booleans(),  # flipped
    ),
    min_size=1,
    max_size=40,
).filter(lambda rows: any(row[2] for row in rows))


def _tensors(rows):
    trainer, engine, mask, flipped = zip(*rows, strict=True)
    return (
        torch.tensor(trainer),
        torch.tensor(engine),
        torch.tensor(mask),
        torch.tensor(flipped),
    )


@given(TOKENS)
def test_every_metric_equals_its_formula(rows):
    metrics = mismatch_metrics(*_tensors(rows))
    kept = [(float(t), float(e), f) for t, e, response, f in rows if response]
    log_rho = np.clip([t - e for t, e, _ in kept], -20, 20)
    rho = np.exp(log_rho)
    expected = {
        "mismatch/k1": np.mean(-log_rho),
        "mismatch/k3": np.mean(rho - log_rho - 1),
        "mismatch/abs_diff_mean": np.mean(np.abs(log_rho)),
        "mismatch/abs_diff_max": np.max(np.abs(log_rho)),
        "mismatch/mult_prob_error": np.mean(np.exp(np.abs(log_rho))),
        "mismatch/num_tokens": len(kept),
        "mismatch/num_flipped": sum(f for _, _, f in kept),
    }
    flipped = [abs(x) for x, (_, _, f) in zip(log_rho, kept, strict=True) if f]
    if flipped:
        expected["mismatch/abs_diff_median_flipped"] = np.median(flipped)
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(TOKENS)
def test_tokens_outside_the_mask_do_not_count(rows):
    trainer, engine, mask, flipped = _tensors(rows)
    spoiled = torch.where(mask, trainer, torch.nan)
    assert mismatch_metrics(spoiled, engine, mask, flipped) == mismatch_metrics(
        trainer, engine, mask, flipped
    )


def test_equal_log_probabilities_have_no_mismatch():
    logprobs = torch.tensor([-0.5, -2.0, -7.0])
    metrics = mismatch_metrics(logprobs, logprobs.clone(), torch.tensor([True, True, False]))
    assert metrics == {
        "mismatch/k1": 0.0,
        "mismatch/k3": 0.0,
        "mismatch/abs_diff_mean": 0.0,
        "mismatch/abs_diff_max": 0.0,
        "mismatch/mult_prob_error": 1.0,
        "mismatch/num_tokens": 2.0,
    }


def test_a_small_difference_keeps_its_digits():
    """k3 of a difference d is d^2 / 2 to first order; exp(d) - d - 1 loses it below 1e-8."""
    engine = torch.full((8,), -1.0, dtype=torch.float64)
    metrics = mismatch_metrics(engine + 1e-9, engine, torch.ones(8, dtype=torch.bool))
    assert metrics["mismatch/k3"] == pytest.approx(5e-19, rel=1e-3, abs=0)


def test_area_names_the_native_pair():
    one = torch.tensor([-1.0])
    metrics = mismatch_metrics(one, one, torch.tensor([True]), area="mismatch_native")
    assert set(metrics) >= {"mismatch_native/k3"}
    assert all(name.startswith("mismatch_native/") for name in metrics)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "rollout_logprobs"])
def test_a_number_that_is_none_is_refused_by_token(name, bad):
    logprobs = {"logprobs": torch.zeros(4), "rollout_logprobs": torch.zeros(4)}
    logprobs[name][2] = bad
    with pytest.raises(ValueError, match=rf"^{name}\[2\] is -?(nan|inf).*1 of 3 response tokens"):
        mismatch_metrics(**logprobs, mask=torch.tensor([False, True, True, True]))


def test_an_empty_mask_and_unequal_shapes_are_refused():
    three = torch.zeros(3)
    with pytest.raises(ValueError, match="at least one response token"):
        mismatch_metrics(three, three, torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"'rollout_logprobs': \(2,\)"):
        mismatch_metrics(three, three[:2], torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask: expected bool"):
        mismatch_metrics(three, three, torch.ones(3))
