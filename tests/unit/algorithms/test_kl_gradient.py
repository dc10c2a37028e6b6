"""The gradient of every KL term that a configuration may have, against that of the exact KL.

A vocabulary of a few tokens is enumerated: expectations over the policy's samples are sums, so
nothing is estimated and nothing random decides.
"""

from itertools import product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.kl import Estimator
from rltrain.algorithms.objective import Targets, policy_objective
from rltrain.batch import Batch
from rltrain.config.algorithm import AlgorithmConfig, KLConfig
from rltrain.controller.stages import with_token_rewards

COEF = 0.3
PLACES = ("loss", "reward")
GRADIENT_OF = {
    ("k2", "loss"): "KL(policy || reference)",
    ("k3", "loss"): "KL(reference || policy)",
    ("k3_k2", "loss"): "KL(policy || reference)",
    ("k1", "reward"): "KL(policy || reference)",
}
"""All that is allowed, as docs/algorithms.md has it."""

numbers = st.lists(st.floats(-2, 2, width=32), min_size=5, max_size=5)


def exact_gradients(logits: Tensor, ref: Tensor) -> dict[str, Tensor]:
    """Of both directions, by autograd through the sums over the vocabulary."""
    found = {}
    for name in ("KL(policy || reference)", "KL(reference || policy)"):
        theta = logits.clone().requires_grad_()
        pi, other = theta.log_softmax(0), ref.log_softmax(0)
        p, q = (pi, other) if name.startswith("KL(policy") else (other, pi)
        (p.exp() * (p - q)).sum().backward()
        assert theta.grad is not None
        found[name] = theta.grad
    return found


def expected_gradient(logits: Tensor, ref: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """Of the loss that the policy's own samples make of the KL term alone, over its coefficient.

    Every token of the vocabulary is a response of its own, and counts with its probability.
    """
    theta = logits.clone().requires_grad_()
    logprobs = theta.log_softmax(0)
    old, other = logprobs.detach(), ref.log_softmax(0)
    size = len(logits)
    batch = Batch(
        tokens=torch.arange(size),
        seq_lens=torch.ones(size, dtype=torch.int64),
        response_mask=torch.ones(size, dtype=torch.bool),
        rewards=torch.zeros(size, dtype=torch.float64),
        old_logprobs=old,
        ref_logprobs=other,
    )
    (rewards,) = with_token_rewards(batch, algorithm, 1, COEF)[0].require("token_rewards")
    loss, _ = policy_objective(
        logprobs,
        torch.zeros_like(logprobs),
        # A baseline takes nothing from the expectation: the reward stands for the advantage.
        Targets(old, rewards, weights=old.exp(), ref_logprobs=other),
        sequence_mean=lambda values: values,
        config=algorithm,
        kl_coef=COEF,
    )
    loss.backward()
    assert theta.grad is not None
    return theta.grad / COEF


def algorithm_with(estimator: str, where: str) -> AlgorithmConfig:
    """Also such as the schema refuses."""
    kl = KLConfig.model_construct(**{"coef": COEF, "estimator": estimator, "where": where})
    return AlgorithmConfig(loss="pg").model_copy(update={"kl": kl})


def is_allowed(estimator: str, where: str) -> bool:
    try:
        KLConfig.model_validate({"coef": COEF, "estimator": estimator, "where": where})
    except ValueError:
        return False
    return True


def test_what_is_allowed_is_what_is_tested() -> None:
    combinations = product(get_args(Estimator), PLACES)
    assert {c for c in combinations if is_allowed(*c)} == GRADIENT_OF.keys()


@pytest.mark.parametrize(("estimator", "where"), GRADIENT_OF)
@given(logits=numbers, ref=numbers)
def test_an_allowed_term_has_the_gradient_of_its_kl(
    estimator: str, where: str, logits: list[float], ref: list[float]
) -> None:
    theta, other = (torch.tensor(x, dtype=torch.float64) for x in (logits, ref))
    found = expected_gradient(theta, other, algorithm_with(estimator, where))
    expected = exact_gradients(theta, other)[GRADIENT_OF[estimator, where]]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0, -0.5], dtype=torch.float64)
REF = torch.tensor([-0.4, 0.5, 0.1, 1.0, -0.7], dtype=torch.float64)
REFUSED: list[Any] = [c for c in product(get_args(Estimator), PLACES) if c not in GRADIENT_OF]


@pytest.mark.parametrize(("estimator", "where"), REFUSED)
def test_a_refused_term_has_the_gradient_of_no_kl(estimator: str, where: str) -> None:
    found = expected_gradient(LOGITS, REF, algorithm_with(estimator, where))
    for exact in exact_gradients(LOGITS, REF).values():
        assert (found - exact).norm() > 0.3 * exact.norm()
    if where == "loss":
        assert found.abs().max() < 1e-12  # k1's is zero, and not another one


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_k2"])
def test_in_a_reward_they_push_a_rare_token_farther_away(estimator: str) -> None:
    """Token 0 has less probability than in the reference. Descent on a KL gives it more."""
    logits, ref = torch.tensor([-2.0, 0.0, 0.0]).double(), torch.zeros(3).double()
    bad = expected_gradient(logits, ref, algorithm_with(estimator, "reward"))
    good = expected_gradient(logits, ref, algorithm_with("k1", "reward"))
    assert -good[0] > 0 > -bad[0]
