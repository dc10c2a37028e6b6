"""Dynamic sampling on a generator that answers at once: what it keeps, and that it ends.

The generator is a stand-in of a few lines. Engines and rewards have their own tests. Only the
values of rewards matter here.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller import sampling
from rltrain.controller.sampling import Sampled, Sampler, teaching_rows
from rltrain.environments.reward_sample import RewardResult
from rltrain.rollout.generator import ResponseGroup
from rltrain.rollout.requests import Rollout

G, WANTED = 2, 3


@dataclass
class Answers:
    """Groups, round by round, in the order in which they finish."""

    rounds: Sequence[Sequence[tuple[float | None, float | None]]]
    order: Sequence[int] = ()
    asked: list[int] = field(default_factory=list)

    def stream(
        self, problems: Any, step: int, round: int, keep: int, patience: Any
    ) -> Iterator[ResponseGroup | None]:
        self.asked.append(round)
        finished = self.order[:keep] or range(len(problems))
        for index in finished:
            tokens = [100 * round + 2 * (G * index + sample) for sample in range(G)]
            yield None
            yield ResponseGroup(
                index,
                [Rollout((t,), (t + 1,), (-1.0,), "stop", 0, None) for t in tokens],
                [f"round {round} sequence {G * index + sample}" for sample in range(G)],
            )


@dataclass
class Pool:
    """Rewards by the first token of a response, when they are collected."""

    rewards: Sequence[Sequence[tuple[float | None, float | None]]]
    submitted: list[int] = field(default_factory=list)
    polls: int = 0
    waits: list[float] = field(default_factory=list)

    def submit_group(self, tokens: Sequence[int]) -> Sequence[int]:
        self.submitted += tokens
        return range(len(self.submitted) - len(tokens), len(self.submitted))

    def poll(self) -> None:
        self.polls += 1

    def has(self, positions: Sequence[int]) -> bool:
        return len(self.waits) >= 2

    def wait(self, limit_s: float) -> None:
        self.waits.append(limit_s)

    def collect(self, positions: Sequence[int]) -> list[RewardResult]:
        tokens = [self.submitted[position] for position in positions]
        found = [self.rewards[t // 100][t % 100 // 2 // G][t // 2 % G] for t in tokens]
        return [
            RewardResult(
                r, "timeout" if r is None else "ok", "", 0.0, None if r is None else r == 1
            )
            for r in found
        ]


def sampler(
    rounds: Any,
    max_rounds: int,
    monkeypatch: pytest.MonkeyPatch,
    order: Sequence[int] = (),
    *,
    seed: int = 0,
    shuffle: bool = False,
) -> Sampler:
    values = {
        "trainer": {"prompts_per_step": WANTED, "seed": seed},
        "data": {"reward": {"shuffle": shuffle}},
        "algorithm": {"group_size": G, "dynamic_sampling": {"max_rounds": max_rounds}},
        "rollout": {"oversample": 1.0 if len(rounds[0]) > WANTED else 0.0},
    }
    monkeypatch.setattr(
        sampling,
        "rewarded_samples",
        lambda tokenizer, problem, group: [r.prompt_tokens[0] for r in group],
    )
    prompts: Any = iter(lambda: [f"problem {n}" for n in range(len(rounds[0]))], None)
    config, unused = Config.model_validate(values), Any
    answers: Any = Answers(rounds, order)
    return Sampler(config, prompts, answers, Pool(rounds), unused)  # type: ignore[arg-type]


def drive(made: Sampler, step: int = 1) -> tuple[Sampled, dict[str, float]]:
    """All of a sampling, advanced until it has ended."""
    found: Any = followed(made, step)[0]
    return found


def followed(made: Sampler, step: int = 1) -> tuple[Any, list[str]]:
    """Its result, and what it waited for."""
    sampling, waits = made.sample(step, lambda: 0.25), []
    while True:
        try:
            waits.append(next(sampling))
        except StopIteration as end:
            return end.value, waits


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_it_says_what_it_waits_for_and_blocks_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = sampler([[SAME, SAME, SAME], [MIXED, MIXED, MIXED]], 2, monkeypatch)
    _, waits = followed(made)
    # The pool has its results after two looks, in the first round.
    assert waits == ["generate"] * WANTED + ["reward"] * 3 + ["generate"] * WANTED + ["reward"]
    assert made.pool.waits == [0.25, 0.25]  # type: ignore[attr-defined]


def test_without_it_every_group_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, metrics = drive(sampler([[SAME, MIXED, SAME]], 0, monkeypatch), 1)
    assert found.batch.num_sequences == WANTED * G
    assert bool(found.batch.require("loss_mask")[0].any())
    assert "group/rounds" not in metrics


def test_it_refills_and_stops_when_enough_groups_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [[SAME, MIXED, SAME], [MIXED, MIXED, MIXED], [SAME] * 3]
    made = sampler(rounds, 3, monkeypatch)
    found, metrics = drive(made, 1)
    assert made.generator.asked == [0, 1]  # type: ignore[attr-defined]
    rewards, groups = found.batch.require("rewards", "group_ids")
    assert rewards.tolist() == [0, 1] * WANTED
    assert groups.tolist() == [1, 1, 2, 2, 3, 3]
    assert found.names[:3] == ["round 0 sequence 2", "round 0 sequence 3", "round 1 sequence 0"]
    assert found.problems == [f"problem {n}" for n in (1, 1, 0, 0, 1, 1)]
    assert found.batch.tokens[:4].tolist() == [4, 5, 6, 7]
    assert "rollout/aborted_groups" not in metrics
    assert metrics["group/rounds"] == 2
    assert metrics["group/kept_fraction"] == WANTED / 6
    assert metrics["reward/mean"] == pytest.approx((5 + 3) / 12)  # of all that was sampled


def test_it_trains_on_fewer_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found, metrics = drive(sampler([[SAME, MIXED, SAME], [SAME] * 3], 2, monkeypatch), 7)
    assert found.batch.num_sequences == G
    assert "step 7: 1 of 3 groups teach after 2 rounds" in caplog.text
    assert metrics["group/kept_fraction"] == 1 / 6


def test_where_nothing_teaches_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    found, metrics = drive(sampler([[SAME] * 3, [SAME] * 3], 2, monkeypatch), 1)
    (loss_mask,) = found.batch.require("loss_mask")
    assert found.batch.num_sequences == WANTED * G and not loss_mask.any()
    assert metrics["group/kept_fraction"] == 0


def test_what_finishes_first_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [[(0.25, 0.5), (None, 1.0), (0.0, 0.75)]]
    found = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        made = sampler(rounds, 0, monkeypatch, order)
        sampled, metrics = drive(made, 1)
        rewards, loss_mask = sampled.batch.require("rewards", "loss_mask")
        assert rewards.nan_to_num(-1).tolist() == [0.25, 0.5, -1, 1.0, 0.0, 0.75]
        assert [result.status for result in sampled.results].count("timeout") == 1
        assert made.pool.polls == 2 * WANTED + 2  # type: ignore[attr-defined]  # while it waits, too
        found.append((sampled.batch.tokens.tolist(), loss_mask.tolist(), sampled.names, metrics))
    assert found[0] == found[1] == found[2]


def test_the_groups_that_finish_first_are_kept_with_their_own_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [[SAME, (0.1, 0.2), MIXED, (0.3, 0.4), SAME, (0.5, 0.6)]] * 2
    sampled, metrics = drive(sampler(rounds, 0, monkeypatch, [5, 3, 1, 0, 2, 4]), 1)
    rewards, groups = sampled.batch.require("rewards", "group_ids")
    assert rewards.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert sampled.batch.tokens.tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert sampled.problems == [f"problem {n}" for n in (1, 1, 3, 3, 5, 5)]
    assert metrics["rollout/aborted_groups"] == 3
    made = sampler(rounds, 2, monkeypatch, [4, 0, 2, 1, 3, 5])  # one group of a round teaches
    sampled, metrics = drive(made, 1)
    assert sampled.batch.num_sequences == 2 * G
    assert metrics["rollout/aborted_groups"] == 6
    assert metrics["group/kept_fraction"] == 2 / 6


DISTINCT = [[(0.0, 0.1), (0.2, 0.3), (0.4, 1.0)]] * 2


def shuffled(monkeypatch: pytest.MonkeyPatch, step: int, seed: int, max_rounds: int = 0) -> Any:
    made = sampler(DISTINCT, max_rounds, monkeypatch, seed=seed, shuffle=True)
    return drive(made, step)


def test_the_control_shuffles_rewards_anew_in_every_step_and_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, unshuffled = drive(sampler(DISTINCT, 0, monkeypatch), 1)
    inorder = plain.batch.require("rewards")[0].tolist()
    orders = []
    for step, seed in ((1, 0), (2, 0), (3, 0), (1, 1), (1, 2)):
        found, metrics = shuffled(monkeypatch, step, seed)
        again, _ = shuffled(monkeypatch, step, seed)
        rewards = found.batch.require("rewards")[0].tolist()
        assert rewards == again.batch.require("rewards")[0].tolist()
        assert sorted(rewards) == sorted(inorder)
        assert found.batch.tokens.tolist() == plain.batch.tokens.tolist()
        assert metrics["reward/mean"] == pytest.approx(unshuffled["reward/mean"])
        assert metrics["reward/accuracy"] == unshuffled["reward/accuracy"] == 1 / 6
        orders.append(tuple(rewards))
    assert tuple(inorder) not in orders
    assert len(set(orders)) == len(orders)


def test_the_control_shuffles_the_rounds_of_a_step_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    with_rewards = sampling.stages.with_rewards
    monkeypatch.setattr(
        sampling.stages,
        "with_rewards",
        lambda batch, rewards, shuffle_seed: (
            seen.append(shuffle_seed)
            or with_rewards(batch, [1.0] * len(rewards), shuffle_seed=shuffle_seed)
        ),
    )
    shuffled(monkeypatch, 1, 0, max_rounds=2)
    assert len(seen) == len(set(seen)) == 2 and None not in seen


def test_what_is_correct_stays_with_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [[(1.0, None), (1.0, 0.0), (0.0, 0.5)], [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]]
    found, metrics = drive(sampler(rounds, 2, monkeypatch, [2, 0, 1]), 1)
    assert metrics["reward/accuracy"] == pytest.approx((2 + 3) / 11)
    assert metrics["group/all_correct_fraction"] == pytest.approx(2 / 6)
    assert metrics["group/all_wrong_fraction"] == pytest.approx(2 / 6)
    rewards = found.batch.require("rewards")[0].tolist()
    assert [result.correct for result in found.results] == [reward == 1 for reward in rewards]
    silent = [(0.0, 1.0)] * WANTED
    made = sampler([silent], 0, monkeypatch)
    collect = made.pool.collect
    made.pool.collect = lambda at: [replace(r, correct=None) for r in collect(at)]  # type: ignore
    _, metrics = drive(made, 1)
    assert "reward/mean" in metrics
    assert not {"reward/accuracy", "group/all_correct_fraction"} & metrics.keys()


def test_the_mean_of_a_part_is_over_the_responses_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = sampler([[(1.0, 0.0), (0.0, None), (1.0, 1.0)]], 0, monkeypatch)
    collect = made.pool.collect
    parts: Any = [{"format": 0.5}, {"format": 0.0, "brief": -1.0}, {}, {}, {"brief": -3.0}, {}]
    made.pool.collect = lambda at: [  # type: ignore[method-assign]
        replace(result, parts=part) for result, part in zip(collect(at), parts, strict=True)
    ]
    _, metrics = drive(made, 1)
    found = {name: value for name, value in metrics.items() if "/part/" in name}
    assert found == {"reward/part/brief": -2.0, "reward/part/format": 0.25}


def test_a_failed_reward_is_no_difference() -> None:
    rewards = torch.tensor([1.0, torch.nan, 0.0, 1.0])
    batch = Batch(
        tokens=torch.zeros(4, dtype=torch.int64),
        seq_lens=torch.ones(4, dtype=torch.int64),
        response_mask=torch.ones(4, dtype=torch.bool),
        rewards=rewards,
        group_ids=torch.tensor([5, 5, 2, 2]),
    )
    assert teaching_rows(batch, 9) == [2, 3]
    assert teaching_rows(batch, 0) == []
