"""Losses and KL estimators, value and gradient, against the papers' formulas in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.algorithms.kl import adapted_coef, kl_estimate
from rltrain.algorithms.losses import LOSSES, find_loss
from rltrain.algorithms.losses.loss_inputs import LossInputs
from rltrain.algorithms.sequences import sequence_mean, sequence_of
from rltrain.config.algorithm import AlgorithmConfig
from tests.unit.algorithms import reference
from tests.unit.algorithms.batches import Ragged, ragged, rare

CONFIGS = {
    "symmetric": AlgorithmConfig(),
    "clip higher": AlgorithmConfig(clip_low=0.2, clip_high=0.28),
    "dual clip": AlgorithmConfig(clip_low=0.1, clip_high=0.4, dual_clip=1.7),
    "open below": AlgorithmConfig(clip_low=1.0, clip_high=3.0),
}
STATS = {"clip_fraction_low": "low", "clip_fraction_high": "high", "dual_clip_fraction": "dual"}


def mean_over(batch: Ragged):
    """[N] -> the mean over its sequence's masked tokens, at each token."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        means = sequence_mean(values, batch.loss_mask, batch.lens)
        return means[sequence_of(batch.lens)]

    return spread


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", LOSSES)
@given(batch=ragged())
@rare
def test_value_and_gradient_equal_the_formula(
    name: str, config: AlgorithmConfig, batch: Ragged
) -> None:
    logprobs, advantages = batch.logprobs(1), batch.noise(2)
    old = logprobs + batch.noise(3, scale=(0.1, 1.0, 30.0)[batch.seed % 3])
    given_logprobs = torch.tensor(logprobs, requires_grad=True)
    found = find_loss(name)(
        LossInputs(
            logprobs=given_logprobs,
            old_logprobs=torch.tensor(old),
            advantages=torch.tensor(advantages),
            mask=batch.loss_mask,
            sequence_mean=mean_over(batch),
            config=config,
        )
    )
    found.loss[batch.loss_mask].sum().backward()
    expected = reference.token_losses(name, batch, logprobs, old, advantages, config)
    mask = np.array(batch.mask, dtype=bool)

    def close(value: torch.Tensor, what: str) -> None:
        np.testing.assert_allclose(value.detach().numpy()[mask], expected[what][mask], rtol=1e-9)

    close(found.loss, "loss")
    close(found.ratio, "ratio")
    for stat, values in found.stats.items():
        close(values, STATS[stat])
    assert set(found.stats) >= ({"clip_fraction_low"} if name != "pg" else set())
    assert given_logprobs.grad is not None
    np.testing.assert_allclose(given_logprobs.grad.numpy(), expected["slope"], rtol=1e-9, atol=0)


@given(batch=ragged())
@rare
def test_gspo_is_the_objective_of_sequences(batch: Ragged) -> None:
    """arXiv:2507.18071, equations 5 to 7: the mean over sequences of min(s A, clip(s) A), with its
    own gradient, where every token of a response has the response's advantage."""
    config = AlgorithmConfig(loss="gspo", clip_low=0.03, clip_high=0.04)
    places = [own for own in reference.tokens(batch) if own]
    logprobs = torch.tensor(batch.logprobs(1), requires_grad=True)
    old = torch.tensor(batch.logprobs(1) + batch.noise(2, scale=0.1))
    advantages = torch.tensor(batch.noise(3)[: len(batch.seq_lens)])[sequence_of(batch.lens)]
    terms = []
    for own in places:
        s = (logprobs[own] - old[own]).sum().div(len(own)).exp()
        clipped = s.clamp(1 - config.clip_low, 1 + config.clip_high)
        terms.append(-torch.minimum(s * advantages[own[0]], clipped * advantages[own[0]]))
    expected = sum(terms, 0 * logprobs.sum()) / max(1, len(places))
    (slope,) = torch.autograd.grad(expected, logprobs)

    inputs = LossInputs(logprobs, old, advantages, batch.loss_mask, mean_over(batch), config)
    weights = torch.tensor(reference.weights(batch, "sequence_mean_token_mean", 9))
    found = (weights * find_loss("gspo")(inputs).loss).sum()
    (found_slope,) = torch.autograd.grad(found, logprobs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found_slope, slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_k2"])
@given(pairs=st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=9))
def test_kl_and_its_gradient_equal_the_formula(kind: str, pairs: list[tuple[float, float]]) -> None:
    logprobs = torch.tensor([p for p, _ in pairs], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([r for _, r in pairs], dtype=torch.float64)
    found = kl_estimate(logprobs, ref, kind)  # type: ignore[arg-type]
    found.sum().backward()
    assert logprobs.grad is not None
    expected = np.array([reference.kl(p, r, kind) for p, r in pairs])
    np.testing.assert_allclose(found.detach().numpy(), expected[:, 0], rtol=1e-7, atol=1e-13)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected[:, 1], rtol=1e-7, atol=1e-13)


def test_estimates_over_all_outcomes_are_the_divergences() -> None:
    """Their mean under the policy, and the gradient of a loss that is made of it."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.5, 0.2, -0.9], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    reverse = (ref.exp() * (ref - logprobs)).sum()

    def slope(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def mean(kind: str) -> torch.Tensor:
        return (logprobs.detach().exp() * kl_estimate(logprobs, ref, kind)).sum()  # type: ignore[arg-type]

    for kind in ("k1", "k3", "k3_k2"):
        torch.testing.assert_close(mean(kind), kl)
    for kind in ("k2", "k3_k2"):
        torch.testing.assert_close(slope(mean(kind)), slope(kl))
    torch.testing.assert_close(slope(mean("k3")), slope(reverse))
    torch.testing.assert_close(slope(mean("k1")), torch.zeros_like(logits), atol=1e-15, rtol=0)


def test_a_small_kl_keeps_its_digits() -> None:
    logprobs = torch.full((1,), -1.0)
    k3 = kl_estimate(logprobs, logprobs + 2**-20, "k3")
    assert float(k3) == pytest.approx(2.0**-41, rel=1e-3, abs=0)


def test_the_coefficient_follows_the_kl_in_bounds() -> None:
    """Ziegler et al., section 2.2, by hand: e = 1.5 / 1 - 1 = 0.5, clipped to 0.2."""
    given = {"target": 1.0, "horizon": 1000}
    assert adapted_coef(0.1, 1.1, 100, **given) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted_coef(0.1, 1.5, 100, **given) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert adapted_coef(0.1, 0.0, 100, **given) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert adapted_coef(0.1, 1.0, 100, **given) == 0.1


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(name: str) -> None:
    logprobs, advantages = -torch.rand(9), torch.randn(9)
    everywhere = torch.ones(9, dtype=torch.bool)
    config = AlgorithmConfig(dual_clip=3.0)
    found = find_loss(name)(
        LossInputs(logprobs, logprobs, advantages, everywhere, lambda x: x, config)
    )
    assert (found.ratio == 1).all() and not any(x.any() for x in found.stats.values())
    torch.testing.assert_close(found.loss, -advantages)


def test_a_ratio_that_ran_away_stays_finite() -> None:
    logprobs = torch.tensor([-1.0, -500.0], requires_grad=True)
    one, config = torch.ones(2), AlgorithmConfig()
    inputs = LossInputs(logprobs, torch.tensor([-500.0, -1.0]), -one, one > 0, lambda x: x, config)
    for loss in LOSSES.values():
        found = loss(inputs).loss
        found.sum().backward()
        assert found.isfinite().all() and logprobs.grad is not None
        assert logprobs.grad.isfinite().all() and float(found.detach().abs().max()) <= math.exp(21)
