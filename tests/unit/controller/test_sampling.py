"""Dynamic sampling on a generator that answers at once: what it keeps, and that it ends.

The generator is a stand-in of a few lines for what has tests of its own (engines, rewards): here
only rewards matter.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller import sampling
from rltrain.controller.sampling import Sampler, teaching_rows
from rltrain.tracking.timers import StepTimer

G, WANTED = 2, 3


@dataclass
class Answers:
    """Groups of rewards, round by round."""

    rounds: Sequence[Sequence[tuple[float | None, float | None]]]
    asked: list[int] = field(default_factory=list)

    def generate(
        self, problems: Any, step: int, round: int
    ) -> tuple[Batch, list[float | None], list[str]]:
        self.asked.append(round)
        rewards = [r for group in self.rounds[round] for r in group]
        n = len(rewards)
        batch = Batch(
            tokens=torch.arange(2 * n) + 100 * round,
            seq_lens=torch.full((n,), 2),
            response_mask=torch.tensor([False, True]).repeat(n),
            group_ids=torch.arange(n) // G,
            truncated=torch.zeros(n, dtype=torch.bool),
        )
        return batch, rewards, [f"round {round} sequence {i}" for i in range(n)]


@dataclass
class Judged:
    value: float | None
    status: str = "ok"


def sampler(rounds: Any, max_rounds: int, monkeypatch: pytest.MonkeyPatch) -> Sampler:
    values = {
        "trainer": {"prompts_per_step": WANTED},
        "algorithm": {"group_size": G, "dynamic_sampling": {"max_rounds": max_rounds}},
    }
    monkeypatch.setattr(
        sampling, "judge", lambda pool, tokenizer, problems, rewards: [Judged(r) for r in rewards]
    )
    prompts: Any = iter(lambda: ["problem"] * WANTED, None)
    config, unused = Config.model_validate(values), Any
    return Sampler(config, prompts, Answers(rounds), unused, unused)  # type: ignore[arg-type]


SAME, MIXED = (1.0, 1.0), (0.0, 1.0)


def test_without_it_every_group_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, metrics = sampler([[SAME, MIXED, SAME]], 0, monkeypatch).sample(1, StepTimer())
    assert found.batch.num_sequences == WANTED * G
    assert bool(found.batch.require("loss_mask")[0].any())
    assert "group/rounds" not in metrics


def test_it_refills_and_stops_when_enough_groups_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [[SAME, MIXED, SAME], [MIXED, MIXED, MIXED], [SAME] * 3]
    made = sampler(rounds, 3, monkeypatch)
    found, metrics = made.sample(1, StepTimer())
    assert made.generator.asked == [0, 1]  # type: ignore[attr-defined]
    rewards, groups = found.batch.require("rewards", "group_ids")
    assert rewards.tolist() == [0, 1] * WANTED
    assert groups.tolist() == [1, 1, 2, 2, 3, 3]
    assert found.names[:3] == ["round 0 sequence 2", "round 0 sequence 3", "round 1 sequence 0"]
    assert found.batch.tokens[:4].tolist() == [4, 5, 6, 7]
    assert metrics["group/rounds"] == 2
    assert metrics["group/kept_fraction"] == WANTED / 6
    assert metrics["reward/mean"] == pytest.approx((5 + 3) / 12)  # of all that was sampled


def test_it_trains_on_fewer_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found, metrics = sampler([[SAME, MIXED, SAME], [SAME] * 3], 2, monkeypatch).sample(
            7, StepTimer()
        )
    assert found.batch.num_sequences == G
    assert "step 7: 1 of 3 groups teach after 2 rounds" in caplog.text
    assert metrics["group/kept_fraction"] == 1 / 6


def test_where_nothing_teaches_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    found, metrics = sampler([[SAME] * 3, [SAME] * 3], 2, monkeypatch).sample(1, StepTimer())
    (loss_mask,) = found.batch.require("loss_mask")
    assert found.batch.num_sequences == WANTED * G and not loss_mask.any()
    assert metrics["group/kept_fraction"] == 0


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
