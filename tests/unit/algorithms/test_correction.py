"""Rollout correction against its formulas written out in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from rltrain.algorithms.correction import Correction, correct
from rltrain.config.algorithm import CorrectionConfig
from rltrain.tracking.metrics import check_metrics
from tests.unit.algorithms import reference
from tests.unit.algorithms.batches import RARE, Ragged, ragged, rare

CONFIGS = {
    "TIS": CorrectionConfig(weight="token"),
    "MIS": CorrectionConfig(weight="sequence", outside="mask"),
    "IcePop": CorrectionConfig(weight="token", weight_min=0.5, weight_max=5, outside="mask"),
    "geometric": CorrectionConfig(weight="geometric", weight_min=0.9, weight_max=1.1),
    "sequence TIS, normalized": CorrectionConfig(weight="sequence", normalize=True),
    "IcePop, normalized": CorrectionConfig(
        weight="token", weight_min=0.8, outside="mask", normalize=True
    ),
    "token rejection": CorrectionConfig(reject="token"),
    "sequence rejection": CorrectionConfig(reject="sequence", reject_min=0.8, reject_max=1.5),
    "geometric rejection": CorrectionConfig(reject="geometric", reject_min=0.9, reject_max=1.2),
    "k3 rejection": CorrectionConfig(reject="k3", reject_min=0, reject_max=0.2),
    "veto": CorrectionConfig(veto=0.3),
    "all": CorrectionConfig(
        weight="token", weight_min=0.1, reject="geometric", reject_max=1.5, veto=0.05
    ),
}


def pair(batch: Ragged) -> tuple[np.ndarray, np.ndarray]:
    old = batch.logprobs(1)
    return old, old - batch.noise(2, scale=(0.3, 1.0, 20.0)[batch.seed % 3])


def run(batch: Ragged, config: CorrectionConfig) -> Correction:
    return correct(*map(torch.tensor, pair(batch)), batch.loss_mask, batch.lens, config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@given(batch=ragged())
@rare
def test_weights_and_mask_equal_the_formula(config: CorrectionConfig, batch: Ragged) -> None:
    found = run(batch, config)
    weights, kept = reference.correction(batch, *pair(batch), config)
    np.testing.assert_allclose(found.weights.numpy(), weights, rtol=1e-6)
    assert found.weights.dtype == torch.float32
    assert found.mask.tolist() == kept.tolist()


@given(batch=ragged())
@rare
def test_metrics_equal_their_formulas(batch: Ragged) -> None:
    config = CONFIGS["all"].model_copy(update={"normalize": True})
    metrics = run(batch, config).metrics
    check_metrics(metrics)
    if not any(batch.mask):
        assert metrics == {}
        return
    places = [own for own in reference.tokens(batch) if own]
    w = reference.correction(batch, *pair(batch), config)[0]
    bounded = reference.correction(batch, *pair(batch), CONFIGS["all"])[0]
    tokens = [w[t] for own in places for t in own]
    means = [np.mean([w[t] for t in own]) for own in places]
    rho = [np.exp(d) for d in reference.log_rho(batch, *pair(batch)) if d]
    all_rho = np.concatenate(rho)
    geometric = [math.exp(np.log(r).mean()) for r in rho]
    out = [not 0.5 <= g <= 1.5 for g in geometric]
    expected = {
        "fraction_low": np.mean(all_rho < 0.1),
        "fraction_high": np.mean(all_rho > 2.0),
        "normalization": np.mean([bounded[t] for own in places for t in own]),
        "effective_sample_size": np.sum(tokens) ** 2 / np.sum(np.square(tokens)) / len(tokens),
        "sequence_weight_max_deviation": np.max(np.abs(np.array(means) - 1)),
        "reject_sequence_fraction": np.mean(out),
        "reject_token_fraction": np.average(out, weights=[len(r) for r in rho]),
        "veto_token_fraction": np.mean(all_rho < 0.05),
        "veto_sequence_fraction": np.mean([bool((r < 0.05).any()) for r in rho]),
    }
    for name, values in (("weight", tokens), ("sequence_weight", means)):
        for stat in ("mean", "std", "min", "max"):
            expected[f"{name}_{stat}"] = getattr(np, stat)(values)
    named = {f"correction/{name}": float(value) for name, value in expected.items()}
    assert metrics == pytest.approx(named, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("TIS", [1, 2, 0.25, 2]),
        ("IcePop", [1, 0, 0, 4]),
        ("geometric", [1, 1.1, 1.1, 1.1]),
        ("MIS", [1, 1.5, 1.5, 0]),
    ],
)
def test_by_hand(name: str, weights: list[float]) -> None:
    """A prompt token; rho 6 and 1/4 in one response, whose product is 1.5; rho 4 in another."""
    rho = torch.tensor([3.0, 6.0, 0.25, 4.0])
    mask, lens = torch.tensor([False, True, True, True]), torch.tensor([3, 1])
    found = correct(rho.log() - 9, torch.full((4,), -9.0), mask, lens, CONFIGS[name])
    torch.testing.assert_close(found.weights, torch.tensor(weights, dtype=torch.float32))
    assert torch.equal(found.mask, mask)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_agrees_is_left_as_it_is(config: CorrectionConfig) -> None:
    batch = RARE["an empty response"]
    same = torch.tensor(batch.logprobs(1))
    found = correct(same, same.clone(), batch.loss_mask, batch.lens, config)
    assert (found.weights == 1).all() and torch.equal(found.mask, batch.loss_mask)


def test_off_the_mask_nothing_is_read_or_weighed() -> None:
    mask, lens = torch.tensor([False, True]), torch.tensor([2])
    old, rollout = torch.tensor([math.nan, -1.0]), torch.tensor([math.inf, -1.5])
    found = correct(old, rollout, mask, lens, CONFIGS["sequence TIS, normalized"])
    assert found.weights.tolist() == [1.0, 1.0]


def test_where_every_weight_is_masked_nothing_is_divided_by_zero() -> None:
    config = CorrectionConfig(weight="token", weight_max=1.5, outside="mask", normalize=True)
    old, mask = torch.tensor([-1.0, -2.0]), torch.tensor([True, True])
    found = correct(old, old - 3, mask, torch.tensor([2]), config)
    assert found.weights.tolist() == [0.0, 0.0]
    assert found.metrics["correction/effective_sample_size"] == 0.0
    assert found.mask.all(), "a weight of 0 keeps its token in the denominator"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "rollout_logprobs"])
def test_a_number_that_is_none_is_refused_by_sample(name: str, bad: float) -> None:
    pair = {"logprobs": torch.zeros(4), "rollout_logprobs": torch.zeros(4)}
    pair[name][3] = bad
    mask, lens = torch.ones(4, dtype=torch.bool), torch.tensor([2, 2])
    with pytest.raises(ValueError, match=rf"^{name}: token 1 of sequence 1 has -?(nan|inf)"):
        correct(*pair.values(), mask, lens, CONFIGS["TIS"])
