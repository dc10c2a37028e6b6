"""The objective, its denominators and its sums, against the formulas in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from rltrain.algorithms.losses.loss_inputs import LossInputs, TokenLoss
from rltrain.algorithms.objective import (
    RATIO_STEPS,
    Targets,
    policy_objective,
    sft_objective,
    value_objective,
)
from rltrain.algorithms.reduce import Aggregation, loss_weights, weighted_sum
from rltrain.config.algorithm import AlgorithmConfig
from tests.unit.algorithms import reference
from tests.unit.algorithms.batches import Ragged, ragged, rare
from tests.unit.algorithms.test_losses import mean_over

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")
MAX_RESPONSE = 7
KL_COEF, ENTROPY_COEF = 0.3, 0.1


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(batch=ragged())
@rare
def test_weights_equal_the_formula(aggregation: Aggregation, batch: Ragged) -> None:
    found = loss_weights(batch.loss_mask, batch.lens, aggregation, MAX_RESPONSE)
    expected = reference.weights(batch, aggregation, MAX_RESPONSE)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 8) / 4),
        ("sequence_mean_token_mean", ((1 + 2 + 3) / 3 + 8) / 2),
        ("sequence_mean_token_sum", (1 + 2 + 3 + 8) / 2),
        ("constant", (1 + 2 + 3 + 8) / (3 * 10)),
    ],
)
def test_two_responses_by_hand(aggregation: Aggregation, expected: float) -> None:
    """Three tokens in the loss, one, and a third response that was filtered out."""
    mask = torch.tensor([False, True, True, True, True, False, False, False])
    per_token = torch.tensor([9.0, 1.0, 2.0, 3.0, 8.0, 9.0, 9.0, 9.0])
    weights = loss_weights(mask, torch.tensor([4, 2, 2]), aggregation, 10)
    assert float(weighted_sum(weights, per_token)) == pytest.approx(expected)


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "pg"])
@given(batch=ragged())
@rare
def test_loss_gradient_and_sums_equal_the_formula(name: str, where: str, batch: Ragged) -> None:
    estimator = "k2" if where == "loss" else "k1"
    config = AlgorithmConfig(
        loss=name,
        dual_clip=1.5 if name == "ppo" else None,
        clip_high=0.2 if name == "pg" else 0.3,
        entropy_coef=ENTROPY_COEF,
        kl={"coef": KL_COEF, "where": where, "estimator": estimator},  # type: ignore[arg-type]
    )
    logprobs, entropy, advantages = batch.logprobs(1), -batch.logprobs(2), batch.noise(3)
    old, ref = logprobs + batch.noise(4), logprobs + batch.noise(5)
    weights = reference.weights(batch, "sequence_mean_token_mean", MAX_RESPONSE)
    correction = np.abs(batch.noise(6))
    given_logprobs = torch.tensor(logprobs, requires_grad=True)
    loss, sums = policy_objective(
        given_logprobs,
        torch.tensor(entropy),
        Targets(*map(torch.tensor, (old, advantages, weights, ref, correction))),
        sequence_mean=mean_over(batch),
        config=config,
        kl_coef=KL_COEF,
    )
    loss.backward()

    token = reference.token_losses(name, batch, logprobs, old, advantages, config)
    kl = np.array([reference.kl(p, r, estimator) for p, r in zip(logprobs, ref, strict=True)])
    coef = KL_COEF if where == "loss" else 0.0
    policy = float(np.sum(weights * correction * token["loss"]))
    total = policy + float(np.sum(weights * (coef * kl[:, 0] - ENTROPY_COEF * entropy)))
    slope = weights * (correction * token["slope"] + coef * kl[:, 1])
    assert float(loss.detach()) == pytest.approx(total, rel=1e-6, abs=1e-9)
    assert float(sums.totals["policy_loss"]) == pytest.approx(policy, rel=1e-6, abs=1e-9)
    assert given_logprobs.grad is not None
    np.testing.assert_allclose(given_logprobs.grad.numpy(), slope, rtol=1e-6, atol=1e-9)

    mask = np.array(batch.mask, dtype=bool)
    d = np.clip(logprobs - old, -20, 20)
    distance = np.abs(np.log(np.where(mask, token["ratio"], 1.0)))
    expected = {
        "tokens": mask,
        "ratio": token["ratio"],
        "kl": np.exp(d) - 1 - d,
        "entropy": entropy,
        "ref_kl": kl[:, 0],
        **{f"ratio_beyond/{x:g}": distance > x for x in RATIO_STEPS},
    }
    for key, values in expected.items():
        total = float(values[mask].sum())
        assert float(sums.totals[key]) == pytest.approx(total, rel=1e-5, abs=1e-5)
    for stat, key in (("low", "clip_fraction_low"), ("high", "clip_fraction_high")):
        if name != "pg":
            assert float(sums.totals[f"stat/{key}"]) == token[stat].sum()
    if mask.any():
        assert float(sums.maxima["ratio_max"]) == pytest.approx(token["ratio"][mask].max())
        assert float(-sums.maxima["ratio_min"]) == pytest.approx(token["ratio"][mask].min())
        assert float(sums.maxima["entropy_max"]) == max(0.0, entropy[mask].max())


@pytest.mark.parametrize("clip", [None, 0.2])
@given(batch=ragged())
@rare
def test_value_loss_equals_the_formula(clip: float | None, batch: Ragged) -> None:
    values, old, returns = batch.noise(1), batch.noise(2), batch.noise(3)
    weights = reference.weights(batch, "token_mean", MAX_RESPONSE)
    given_values = torch.tensor(values, requires_grad=True)
    targets = {"old_values": old, "returns": returns, "weights": weights}
    tensors = {key: torch.tensor(x) for key, x in targets.items()}
    loss, sums = value_objective(given_values, clip=clip, **tensors)
    loss.backward()
    total, slopes, clipped = 0.0, np.zeros(len(values)), 0
    for t in (t for own in reference.tokens(batch) for t in own):
        error, slope = (values[t] - returns[t]) ** 2 / 2, values[t] - returns[t]
        if clip is not None:
            moved = min(max(values[t], old[t] - clip), old[t] + clip)
            if (moved - returns[t]) ** 2 / 2 > error:
                error, slope = (moved - returns[t]) ** 2 / 2, moved - returns[t]
                slope = 0.0 if moved != values[t] else slope
                clipped += 1
        total, slopes[t] = total + weights[t] * error, weights[t] * slope
    assert float(loss.detach()) == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert float(sums.totals["clipped"]) == clipped
    assert given_values.grad is not None
    np.testing.assert_allclose(given_values.grad.numpy(), slopes, rtol=1e-9, atol=1e-12)


def test_a_value_within_the_clip_is_not_clipped() -> None:
    """In fp32, where a difference that is added again is often another number."""
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.rand(1000, generator=generator) for _ in range(3))
    values, old, returns = values / 1000, old / 10, returns / 1000
    assert (old + (values - old) != values).any()
    fields = {"old_values": old, "returns": returns, "weights": torch.ones(1000)}
    _, sums = value_objective(values, clip=0.2, **fields)
    assert float(sums.totals["clipped"]) == 0


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "pg"])
def test_garbage_off_the_mask_reaches_neither_loss_nor_gradient(name: str) -> None:
    config = AlgorithmConfig(
        loss=name,
        dual_clip=2.0 if name == "ppo" else None,
        entropy_coef=0.1,
        kl={"coef": 0.1},  # type: ignore[arg-type]
    )
    clean = torch.tensor([-1.0, 0.0, -2.0])
    for garbage in (math.nan, math.inf, -math.inf):
        spoiled = torch.tensor([-1.0, garbage, -2.0])
        weights = torch.tensor([0.5, 0.0, 0.5])

        def slopes(given: torch.Tensor, weights: torch.Tensor = weights) -> list[torch.Tensor]:
            logprobs, entropy = given.clone().requires_grad_(), given.clone().requires_grad_()
            targets = Targets(given - 0.1, -given, weights, given + 0.2, given.abs())
            loss, sums = policy_objective(
                logprobs, entropy, targets, sequence_mean=lambda x: x, config=config, kl_coef=0.1
            )
            loss.backward()
            assert logprobs.grad is not None and entropy.grad is not None
            logged = [*sums.totals.values(), *sums.maxima.values()]
            return [loss.detach(), logprobs.grad, entropy.grad, *logged]

        for found, expected in zip(slopes(spoiled), slopes(clean), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mean_of_slots", r"expected loss of shape \(2,\), a number for each slot and no mean"),
        ("bare", "expected a TokenLoss, found Tensor"),
    ],
)
def test_a_loss_that_is_no_number_per_slot_is_refused(name: str, said: str) -> None:
    """Broadcast over the weights, a mean would be right for one micro-batch and wrong for two."""
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=f"algorithm.loss={__name__}.{name}: {said}"):
        policy_objective(
            ones,
            ones,
            Targets(ones, ones, ones / 2),
            sequence_mean=lambda values: values,
            config=AlgorithmConfig(loss=f"{__name__}.{name}"),
            kl_coef=0.0,
        )


def mean_of_slots(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(-inputs.logprobs.mean(), inputs.log_ratio.exp())


def bare(inputs: LossInputs) -> torch.Tensor:
    return -inputs.logprobs


def test_garbage_off_the_mask_reaches_no_value() -> None:
    values = torch.tensor([1.0, math.nan], requires_grad=True)
    targets = {"old_values": values.detach(), "returns": torch.tensor([3.0, math.nan])}
    loss, _ = value_objective(values, weights=torch.tensor([1.0, 0.0]), clip=0.2, **targets)
    loss.backward()
    assert float(loss.detach()) == 2.0
    assert values.grad is not None and values.grad.tolist() == [-2.0, 0.0]


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    logprobs = torch.tensor([math.nan, -2.0, -4.0], requires_grad=True)
    loss, _ = sft_objective(logprobs, weights=torch.tensor([0.0, 0.5, 0.5]))
    loss.backward()
    assert float(loss.detach()) == 3.0
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, -0.5, -0.5]
