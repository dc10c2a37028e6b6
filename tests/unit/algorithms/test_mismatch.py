"""The mismatch metrics against formulas written out again in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from rltrain.algorithms.mismatch import k3_by_age, mismatch_metrics
from tests.unit.algorithms import reference
from tests.unit.algorithms.batches import RARE, Ragged, ragged, rare


def pair(batch: Ragged) -> tuple[np.ndarray, np.ndarray]:
    scale = (1e-3, 1.0, 20.0)[batch.seed % 3]
    rollout = batch.logprobs(1)
    return np.minimum(rollout + batch.noise(2, scale), 0.0), rollout


def flipped(batch: Ragged) -> np.ndarray:
    return batch.noise(3) > 0


def run(batch: Ragged, area: str = "mismatch") -> dict[str, float]:
    given = (*map(torch.tensor, pair(batch)), batch.loss_mask, batch.lens)
    return mismatch_metrics(*given, torch.tensor(flipped(batch)), area=area)


def token_metrics(batch: Ragged) -> dict[str, float]:
    """Means, extremes and quantiles over response tokens."""
    train, rollout = (np.exp(x[np.array(batch.mask)]) for x in pair(batch))
    d = np.concatenate(reference.log_rho(batch, *pair(batch)))
    rho, far, gap = np.exp(d), np.abs(d), np.abs(train - rollout)
    middle = (1 + rho) / 2  # of the mean of both policies, over the rollout's
    reached = far[flipped(batch)[np.array(batch.mask)]]
    found = {
        "k1": np.mean(-d),
        "k3": np.mean(rho - 1 - d),
        "reverse_k3": np.mean(1 / rho + d - 1),
        "js": np.mean(rho * (d - np.log(middle)) / 2 - np.log(middle) / 2),
        "rho_mean": np.mean(rho),
        "chi2_token": np.mean(rho**2) - 1,
        "abs_diff_mean": np.mean(far),
        "abs_diff_std": np.std(far),
        "abs_diff_p99": np.quantile(far, 0.99, method="inverted_cdf"),
        "abs_diff_max": np.max(far),
        "mult_prob_error": np.mean(np.exp(far)),
        "prob_diff_mean": np.mean(gap),
        "prob_diff_std": np.std(gap),
        "prob_diff_max": np.max(gap),
        "num_tokens": len(d),
        "num_flipped": len(reached),
    }
    if len(reached):
        found["abs_diff_median_flipped"] = np.median(reached)
    if np.ptp(train) > 0 and np.ptp(rollout) > 0:
        centered = (train - train.mean()), (rollout - rollout.mean())
        norms = np.sqrt(np.sum(centered[0] ** 2) * np.sum(centered[1] ** 2))
        found["prob_correlation"] = np.sum(centered[0] * centered[1]) / norms
    return found


def sequence_metrics(batch: Ragged) -> dict[str, float]:
    """Means and extremes over responses with a token to compare."""
    train, rollout = pair(batch)
    places, log_rho = reference.tokens(batch), reference.log_rho(batch, train, rollout)
    present = [i for i, own in enumerate(places) if own]
    mean = [-np.mean(train[places[i]]) for i in present]
    rollout_mean = [-np.mean(rollout[places[i]]) for i in present]
    gaps = [-np.mean(log_rho[i]) for i in present]
    distance = [np.mean(np.abs(log_rho[i])) for i in present]
    return {
        "ppl": np.mean(np.exp(mean)),
        "rollout_ppl": np.mean(np.exp(rollout_mean)),
        "log_ppl": np.mean(mean),
        "rollout_log_ppl": np.mean(rollout_mean),
        "ppl_ratio": np.mean(np.exp(gaps)),
        "log_ppl_diff_mean": np.mean(gaps),
        "log_ppl_diff_abs_mean": np.mean(np.abs(gaps)),
        "log_ppl_diff_max": np.max(gaps),
        "log_ppl_diff_min": np.min(gaps),
        "chi2_sequence": np.mean([reference.FORMS["sequence"](log_rho[i]) ** 2 for i in present])
        - 1,
        "worst_sequence": present[int(np.argmax(distance))],
        "worst_sequence_abs_diff": np.max(distance),
    }


@given(batch=ragged())
@rare
def test_every_metric_equals_its_formula(batch: Ragged) -> None:
    if not any(batch.mask):
        with pytest.raises(ValueError, match="at least one response token"):
            run(batch)
        return
    expected = token_metrics(batch) | sequence_metrics(batch)
    expected = {f"mismatch/{name}": float(value) for name, value in expected.items()}
    assert run(batch) == pytest.approx(expected, rel=1e-8, abs=1e-12)


@given(batch=ragged().filter(lambda b: any(b.mask)))
def test_k3_by_age_is_the_mean_over_the_tokens_of_an_age(batch: Ragged) -> None:
    ages = np.random.default_rng(batch.seed).integers(0, 3, len(batch.mask))
    found = k3_by_age(
        *map(torch.tensor, pair(batch)), batch.loss_mask, batch.lens, torch.tensor(ages)
    )
    d = np.concatenate(reference.log_rho(batch, *pair(batch)))
    of_tokens = ages[np.array(batch.mask)]
    expected = {
        f"mismatch/k3/age_{age}": np.mean(np.exp(d) - 1 - d, where=of_tokens == age)
        for age in set(of_tokens.tolist())
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(batch=ragged().filter(lambda b: any(b.mask)))
def test_tokens_outside_the_mask_do_not_count(batch: Ragged) -> None:
    train, rollout = map(torch.tensor, pair(batch))
    spoiled = torch.where(batch.loss_mask, train, torch.nan)
    given = rollout, batch.loss_mask, batch.lens
    assert mismatch_metrics(spoiled, *given) == mismatch_metrics(train, *given)


def test_estimates_over_all_outcomes_are_the_divergences() -> None:
    """Every outcome as often as the rollout samples it: 2, 1 and 1 times in 4."""
    rollout = torch.tensor([0.5, 0.5, 0.25, 0.25], dtype=torch.float64)
    train = torch.tensor([0.2, 0.2, 0.7, 0.1], dtype=torch.float64)
    mask, lens = torch.ones(4, dtype=torch.bool), torch.tensor([4])
    found = mismatch_metrics(train.log(), rollout.log(), mask, lens)
    t, r = np.array([0.2, 0.7, 0.1]), np.array([0.5, 0.25, 0.25])

    def kl(p: np.ndarray, q: np.ndarray) -> float:
        return float(np.sum(p * np.log(p / q)))

    m = (t + r) / 2
    assert found["mismatch/k1"] == pytest.approx(kl(r, t))
    assert found["mismatch/k3"] == pytest.approx(kl(r, t))
    assert found["mismatch/js"] == pytest.approx(kl(t, m) / 2 + kl(r, m) / 2)
    assert found["mismatch/rho_mean"] == pytest.approx(1.0)
    assert found["mismatch/chi2_token"] == pytest.approx(float(np.sum(t**2 / r)) - 1)


def test_equal_log_probabilities_have_no_mismatch() -> None:
    logprobs, mask = torch.tensor([-0.5, -2.0, -7.0]), torch.tensor([True, True, False])
    found = mismatch_metrics(logprobs, logprobs.clone(), mask, torch.tensor([3]))
    ones = {"mult_prob_error", "rho_mean", "ppl_ratio", "prob_correlation"}
    sizes = {"num_tokens": 2.0, "log_ppl": 1.25, "rollout_log_ppl": 1.25}
    sizes |= {"ppl": math.exp(1.25), "rollout_ppl": math.exp(1.25)}
    for name, value in found.items():
        name = name.removeprefix("mismatch/")
        assert value == pytest.approx(sizes.get(name, 1.0 if name in ones else 0.0)), name


def test_a_small_difference_keeps_its_digits() -> None:
    """k3 of a difference d is d^2 / 2 to first order, and JS d^2 / 8; naively both lose it below
    1e-8."""
    engine = torch.full((8,), -1.0, dtype=torch.float64)
    mask, lens = torch.ones(8, dtype=torch.bool), torch.tensor([8])
    found = mismatch_metrics(engine + 1e-9, engine, mask, lens)
    assert found["mismatch/k3"] == pytest.approx(5e-19, rel=1e-3, abs=0)
    assert found["mismatch/reverse_k3"] == pytest.approx(5e-19, rel=1e-3, abs=0)
    assert found["mismatch/js"] == pytest.approx(1.25e-19, rel=1e-3, abs=0)


def test_area_names_the_native_pair() -> None:
    metrics = run(RARE["equal rewards"], area="mismatch_native")
    assert all(name.startswith("mismatch_native/") for name in metrics)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "rollout_logprobs"])
def test_a_number_that_is_none_is_refused_by_token(name: str, bad: float) -> None:
    logprobs = {"logprobs": torch.zeros(4), "rollout_logprobs": torch.zeros(4)}
    logprobs[name][2] = bad
    mask, lens = torch.tensor([False, True, True, True]), torch.tensor([1, 3])
    with pytest.raises(
        ValueError, match=rf"^{name}: token 1 of sequence 1 has -?(nan|inf).*1 of 3 response"
    ):
        mismatch_metrics(**logprobs, mask=mask, seq_lens=lens)


def test_unequal_shapes_and_masks_that_are_none_are_refused() -> None:
    three, yes, lens = torch.zeros(3), torch.ones(3, dtype=torch.bool), torch.tensor([3])
    with pytest.raises(ValueError, match=r"'rollout_logprobs': \(2,\)"):
        mismatch_metrics(three, three[:2], yes, lens)
    with pytest.raises(ValueError, match=r"'sum of seq_lens': \(4,\)"):
        mismatch_metrics(three, three, yes, torch.tensor([4]))
    with pytest.raises(ValueError, match="mask: expected bool"):
        mismatch_metrics(three, three, torch.ones(3), lens)
    with pytest.raises(ValueError, match=r"flipped: expected bool of shape \(3,\)"):
        mismatch_metrics(three, three, yes, lens, yes[:2])
