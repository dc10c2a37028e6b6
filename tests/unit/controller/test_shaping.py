"""Rewards on the way to advantages, and what each token counts in the loss."""

import re
from typing import Any

import pytest
import torch

from rltrain.algorithms.advantages import ADVANTAGES
from rltrain.algorithms.advantages.advantage_inputs import Advantage, Advantages
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.stages import (
    overlong_penalty,
    with_advantages,
    with_rewards,
    with_token_rewards,
)
from rltrain.controller.step_metrics import reward_metrics, update_metrics
from rltrain.environments.reward_sample import RewardResult
from rltrain.policy.types import Updated

PROMPT, LENGTHS = 1, (3, 2, 4, 1)


def sampled(rewards: list[float | None]) -> Batch:
    """A prompt token and 3, 2, 4, 1 response tokens; two groups of two; the third was cut."""
    lens = torch.tensor(LENGTHS) + PROMPT
    mask = torch.cat([torch.arange(n) >= PROMPT for n in lens.tolist()])
    batch = Batch(
        tokens=torch.arange(len(mask)),
        seq_lens=lens,
        response_mask=mask,
        group_ids=torch.tensor([0, 0, 1, 1]),
        truncated=torch.tensor([False, False, True, False]),
        old_logprobs=-torch.arange(len(mask)) / 10.0,
    )
    return with_rewards(batch, rewards)


def config(**algorithm: Any) -> Config:
    values = {"algorithm": {"group_size": 2} | algorithm, "rollout": {"max_response_tokens": 4}}
    return Config.model_validate(values | {"trainer": {"prompts_per_step": 2}})


def shaped(batch: Batch, cfg: Config, kl_coef: float = 0.0) -> Batch:
    return with_token_rewards(batch, cfg.algorithm, 4, kl_coef)[0]


def test_the_reward_lies_on_the_last_response_token() -> None:
    rewarded = shaped(sampled([1.0, 2.0, 3.0, 4.0]), config())
    (rewards,) = rewarded.require("token_rewards")
    assert rewards.tolist() == [0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 3, 0, 4]


def test_shuffled_rewards_are_others_rewards_the_same_in_every_run() -> None:
    """A control that gave each response its own reward would learn."""
    rewards = [float(i) for i in range(64)]
    lens = torch.ones(64, dtype=torch.int64)
    response = torch.ones(64, dtype=torch.bool)
    batch = Batch(tokens=torch.arange(64), seq_lens=lens, response_mask=response)

    def shuffled(given: list[float | None], seed: int) -> Batch:
        return with_rewards(batch, given, shuffle_seed=seed)

    (found,) = shuffled([*rewards], 1).require("rewards")
    assert sorted(found.tolist()) == rewards
    assert (found == torch.tensor(rewards)).sum() < 8
    assert torch.equal(found, shuffled([*rewards], 1).require("rewards")[0])
    assert not torch.equal(found, shuffled([*rewards], 2).require("rewards")[0])
    # Who gets the reward that failed leaves the loss, and not whose reward it was.
    failed, mask = shuffled([None, *rewards[1:]], 1).require("rewards", "loss_mask")
    assert torch.equal(failed.isnan(), ~mask) and failed.isnan().sum() == 1
    assert found[failed.isnan()] == 0


def test_the_kl_is_taken_from_every_response_token() -> None:
    batch = sampled([1.0, 2.0, 3.0, 4.0])
    (old,) = batch.require("old_logprobs")
    batch = batch.with_fields(ref_logprobs=old - 0.5)  # k1 = 0.5
    cfg = config(kl={"coef": 0.1, "where": "reward", "estimator": "k1"})
    (rewards,) = shaped(batch, cfg, kl_coef=0.2).require("token_rewards")
    expected = [0, -0.1, -0.1, 0.9, 0, -0.1, 1.9, 0, -0.1, -0.1, -0.1, 2.9, 0, 3.9]
    assert rewards.tolist() == pytest.approx(expected)
    in_loss = config(kl={"coef": 0.1})
    assert shaped(batch, in_loss, kl_coef=0.2).require("token_rewards")[0].sum() == 10


def test_the_overlong_penalty_is_equation_13() -> None:
    """L_max = 16, L_cache = 4: none up to 12, linear to the whole penalty at 16."""
    lengths = torch.tensor([1.0, 12.0, 13.0, 14.0, 16.0], dtype=torch.float64)
    cfg = config(overlong={"buffer_tokens": 4, "penalty": 2.0}).algorithm.overlong
    assert overlong_penalty(lengths, cfg, 16).tolist() == [0, 0, 0.5, 1.0, 2.0]
    assert overlong_penalty(lengths, config().algorithm.overlong, 16).tolist() == [0] * 5


def test_a_cut_response_stays_in_the_baseline_and_leaves_the_loss() -> None:
    batch = shaped(sampled([0.0, 1.0, 0.0, 1.0]), config())
    masked, _ = with_advantages(batch, config(overlong={"mask": True}, advantage="dr_grpo"))
    advantages, weights = masked.require("advantages", "loss_weights")
    third, fourth = slice(8, 12), slice(13, 14)
    assert not weights[third].any()
    assert advantages[fourth].tolist() == [0.5]  # against a mean of both
    assert weights.sum() == pytest.approx(1.0)
    assert (weights > 0).sum() == 3 + 2 + 1


def test_a_failed_reward_leaves_baseline_and_loss() -> None:
    batch = shaped(sampled([None, 1.0, 0.0, 1.0]), config())
    weighed, metrics = with_advantages(batch, config(advantage="dr_grpo"))
    advantages, weights = weighed.require("advantages", "loss_weights")
    assert not advantages[:7].any() and not weights[:4].any()
    assert metrics["advantage/max"] == 0.5


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_where_every_reward_failed_nothing_is_learned(advantage: str) -> None:
    batch = sampled([None, None, None, None])
    cfg = config(advantage=advantage, overlong={"buffer_tokens": 2})
    batch, metrics = with_token_rewards(batch, cfg.algorithm, 4, 0.0)
    batch = batch.with_fields(values=torch.ones(batch.num_tokens))
    batch, found = with_advantages(batch, cfg)
    assert not metrics | found
    assert not any(values.any() for values in batch.require("advantages", "loss_weights"))
    failed = [RewardResult(None, status, "", 0.0) for status in ("error", *["timeout"] * 3)]
    assert reward_metrics(batch, failed) == {
        "reward/failed_fraction": 1 / 4,
        "reward/timeout_fraction": 3 / 4,
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a_tensor", "expected Advantages, found Tensor"),
        ("short", r"expected advantages of shape \(14,\), one per token, found \(4,\)"),
        ("nan", "advantages by algorithm.advantage=.*: token 1 of sequence 0 has nan"),
    ],
)
def test_ones_own_advantage_is_refused_by_its_name(name: str, said: str) -> None:
    cfg = config(advantage=f"{__name__}.{name}")
    with pytest.raises(ValueError, match=f"algorithm.advantage={__name__}.{name}") as caught:
        with_advantages(shaped(sampled([0.0, 1.0, 0.0, 1.0]), cfg), cfg)
    assert re.search(said, str(caught.value))


a_tensor: Any = Advantage(lambda inputs: inputs.rewards)  # type: ignore[arg-type,return-value]
short = Advantage(lambda inputs: Advantages(inputs.rewards))
nan = Advantage(lambda inputs: Advantages(torch.full_like(inputs.token_rewards, torch.nan)))


def test_each_mini_batch_has_its_own_denominator() -> None:
    """Four sequences over three mini-batches: 2, 1 and 1 of them."""
    batch = shaped(sampled([0.0, 1.0, 0.0, 1.0]), config())
    cfg = config()
    parts = cfg.trainer.model_copy(update={"mini_batches": 3})
    weighed, _ = with_advantages(batch, cfg.model_copy(update={"trainer": parts}))
    (weights,) = weighed.require("loss_weights")
    assert [float(w.sum()) for w in weights.split([7, 5, 2])] == pytest.approx([1, 1, 1])
    assert weights[1] == pytest.approx(1 / 5) and weights[13] == 1


def updated(tokens: float, **totals: float) -> Updated:
    named = {"tokens": tokens, "loss": 1.0, "policy_loss": 1.0, "ratio": tokens, "kl": 0.0}
    maxima = {"ratio_max": 1.5, "ratio_min": -0.5, "entropy_max": 2.0}
    stats = {f"stat/{name}": value for name, value in totals.items()}
    return Updated(totals=named | {"entropy": 0.0} | stats, maxima=maxima, grad_norm=1.0, lr=0.1)


def test_means_are_over_tokens_and_a_skipped_update_is_counted() -> None:
    sides = {"clip_fraction_high": 1.0}
    found = update_metrics(
        [
            updated(1, clip_fraction_low=1.0, mine=1.0, **sides),
            updated(3, clip_fraction_low=0.0, mine=3.0, **sides),
        ],
        mini_batches=4,
    )
    assert found["policy/clip_fraction_low"] == 1 / 4  # not the mean of 1 and 0
    assert found["policy/clip_fraction"] == 3 / 4
    assert found["custom/mine"] == 1
    assert found["policy/ratio_min"] == 0.5
    assert found["policy/skipped_updates"] == 2
    assert update_metrics([], mini_batches=4) == {"policy/skipped_updates": 4}
