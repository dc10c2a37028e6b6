"""Losses, KL estimators, weights and the objective against formulas written out in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import clipped_surrogate, importance_ratio, is_clipped
from rltrain.algorithms.objective import grpo_objective, sft_objective
from rltrain.algorithms.reduce import loss_weights, weighted_sum
from rltrain.config.algorithm import AlgorithmConfig


def a_batch(seed: int, num_sequences: int = 6) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 7, (num_sequences,), generator=g)
    n = int(lens.sum())
    return {
        "seq_lens": lens,
        "mask": torch.rand(n, generator=g) < 0.6,
        "logprobs": -torch.rand(n, generator=g) * 3,
        "old": -torch.rand(n, generator=g) * 3,
        "ref": -torch.rand(n, generator=g) * 3,
        "entropy": torch.rand(n, generator=g),
        "advantages": torch.randn(n, generator=g),
    }


def numpy_loss(b: dict[str, torch.Tensor], config: AlgorithmConfig) -> float:
    """arXiv:1707.06347 equation 7 with two clip ranges, summed token by token."""
    x = {k: v.double().numpy() for k, v in b.items() if k != "mask"}
    mask = b["mask"].numpy()
    per_token = []
    for t in range(len(mask)):
        r = np.exp(x["logprobs"][t] - x["old"][t])
        a = x["advantages"][t]
        clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
        log_r = x["ref"][t] - x["logprobs"][t]
        kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[
            config.kl_estimator
        ]
        value = -min(r * a, clipped * a) + config.kl_coef * kl
        per_token.append(value - config.entropy_coef * x["entropy"][t])
    ends = np.cumsum(b["seq_lens"].numpy())
    spans = list(zip(ends - b["seq_lens"].numpy(), ends, strict=True))
    if config.aggregation == "token_mean":
        return float(sum(v for v, m in zip(per_token, mask, strict=True) if m) / max(1, mask.sum()))
    means = [np.mean(np.asarray(per_token[s:e])[mask[s:e]]) for s, e in spans if mask[s:e].any()]
    return float(np.mean(means)) if means else 0.0


@given(
    st.integers(0, 10_000),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.sampled_from(["k1", "k2", "k3"]),
)
def test_objective_equals_the_formula(seed: int, aggregation: str, kl: str) -> None:
    config = AlgorithmConfig(
        aggregation=aggregation, kl_estimator=kl, kl_coef=0.3, entropy_coef=0.1, clip_high=0.3
    )
    b = a_batch(seed)
    weights = loss_weights(b["mask"], b["seq_lens"], config.aggregation)
    loss, sums = grpo_objective(
        b["logprobs"],
        b["entropy"],
        old_logprobs=b["old"],
        ref_logprobs=b["ref"],
        advantages=b["advantages"],
        weights=weights,
        config=config,
    )
    assert float(loss) == pytest.approx(numpy_loss(b, config), rel=1e-4, abs=1e-5)
    assert float(sums.totals["tokens"]) == int(b["mask"].sum())


@given(st.integers(0, 10_000), st.sampled_from(["token_mean", "sequence_mean"]), st.integers(1, 6))
def test_loss_and_gradient_do_not_depend_on_the_cut(
    seed: int, aggregation: str, parts: int
) -> None:
    config, b = AlgorithmConfig(aggregation=aggregation), a_batch(seed)
    weights = loss_weights(b["mask"], b["seq_lens"], config.aggregation)

    def loss_and_grad(num_parts: int) -> tuple[float, torch.Tensor]:
        logprobs = b["logprobs"].double().requires_grad_()
        pieces = zip(
            *(
                x.tensor_split(num_parts)
                for x in (logprobs, b["entropy"], b["old"], b["advantages"], weights)
            ),
            strict=True,
        )
        total = sum(
            grpo_objective(
                lp, h, old_logprobs=old, ref_logprobs=None, advantages=a, weights=w, config=config
            )[0]
            for lp, h, old, a, w in pieces
            if len(lp)
        )
        assert isinstance(total, torch.Tensor)
        total.backward()
        assert logprobs.grad is not None
        return float(total.detach()), logprobs.grad

    (loss, grad), (cut_loss, cut_grad) = loss_and_grad(1), loss_and_grad(parts)
    assert cut_loss == pytest.approx(loss, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(cut_grad, grad)


@given(st.integers(0, 10_000))
def test_weights_sum_to_one(seed: int) -> None:
    b = a_batch(seed)
    for aggregation in ("token_mean", "sequence_mean"):
        total = float(loss_weights(b["mask"], b["seq_lens"], aggregation).sum())
        assert total == pytest.approx(1.0 if b["mask"].any() else 0.0, abs=1e-5)


def test_nan_outside_the_weights_stays_out() -> None:
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    total = weighted_sum(torch.tensor([0.5, 0.0]), values)
    total.backward()
    assert float(total.detach()) == 0.5
    assert values.grad is not None and values.grad.tolist() == [0.5, 0.0]


def test_on_policy_ratio_is_one_and_nothing_is_clipped() -> None:
    logprobs, advantages = -torch.rand(9), torch.randn(9)
    ratio = importance_ratio(logprobs, logprobs)
    assert (ratio == 1).all()
    assert not is_clipped(ratio, advantages, clip_low=0.2, clip_high=0.2).any()
    loss = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(loss, -advantages)


def test_clipped_tokens_have_no_gradient() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    clipped_surrogate(ratio, advantages, **clip).sum().backward()
    assert ratio.grad is not None and ratio.grad.tolist() == [0.0, 0.0, 1.0, -1.0]
    assert is_clipped(ratio, advantages, **clip).tolist() == [True, True, False, False]


def test_kl_of_equal_policies_is_zero_and_k3_is_never_negative() -> None:
    logprobs = -torch.rand(20)
    for kind in ("k1", "k2", "k3"):
        assert (kl_estimate(logprobs, logprobs, kind) == 0).all()
    assert (kl_estimate(logprobs, -torch.rand(20), "k3") >= -1e-6).all()


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0])
    loss, _ = sft_objective(logprobs, weights=torch.tensor([0.0, 0.5, 0.5]))
    assert float(loss) == 3.0
