"""The pipeline over engines of a few lines: order, age of the tokens, what may run when.

Engines, rewards and weight syncs that are real are in tests/integration/test_asynchronous.py.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.batch import Batch
from rltrain.config.trainer import TrainerConfig
from rltrain.controller.admission import Admission, Schedule, make_schedule, recorded_starts
from rltrain.controller.pipeline import BusyTime, RolloutPipeline
from rltrain.tracking.timers import StepTimer


class Prompts:
    """Counts how many rounds were drawn."""

    drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}


@dataclass
class Engines:
    """What was sent and not answered, by step; ``lost`` ones take nothing."""

    version: int = 1
    running: set[int] = field(default_factory=set)
    lost: bool = False

    @property
    def is_generating(self) -> bool:
        return bool(self.running)

    @property
    def num_requests(self) -> int:
        return len(self.running)


@dataclass
class Sampler:
    """Of every step as many rounds as ``rounds`` says, each of so many looks as ``looks`` says."""

    looks: Mapping[int, tuple[int, int]]
    rounds: Mapping[int, int]
    config: Any
    prompts: Prompts = field(default_factory=Prompts)
    generator: Engines = field(default_factory=Engines)
    closed: list[int] = field(default_factory=list)
    patience: list[float] = field(default_factory=list)

    def sample(self, step: int, patience: Any) -> Iterator[str]:
        generate, reward = self.looks[step]
        versions = []
        try:
            for _ in range(self.rounds[step]):
                self.prompts.drawn += 1
                while self.generator.lost:
                    yield "generate"
                self.generator.running.add(step)
                versions.append(self.generator.version)
                for _ in range(generate):
                    self.patience.append(patience())
                    yield "generate"
                self.generator.running.discard(step)
                for _ in range(1 + reward):
                    yield "reward"
        except GeneratorExit:
            self.closed.append(step)
            raise
        return batch(versions), {"of": float(step)}


def batch(versions: list[int]) -> Any:
    """A prompt of one token and a response of two for each version."""

    class Sampled:
        batch = Batch(
            tokens=torch.arange(3 * len(versions)),
            seq_lens=torch.full((len(versions),), 3),
            response_mask=torch.tensor([False, True, True]).repeat(len(versions)),
            token_versions=torch.tensor(versions).repeat_interleave(3),
        )

    return Sampled()


def config(max_rounds: int) -> Any:
    class Dynamic:
        pass

    found: Any = Dynamic()
    found.algorithm = Dynamic()
    found.algorithm.dynamic_sampling = Dynamic()
    found.algorithm.dynamic_sampling.max_rounds = max_rounds
    return found


def pipeline_of(sampler: Any, schedule: Schedule, rows: list[Any], **more: Any) -> RolloutPipeline:
    def write(step: int, row: Mapping[str, Any]) -> None:
        rows.append({"step": step, **row})

    ahead = {"is_ahead": schedule.max_staleness > 0, **more}
    ahead = {"capacity": 99, **ahead}
    return RolloutPipeline(
        sampler, schedule, write, next_step=1, cursor=sampler.prompts.state_dict(), **ahead
    )


STEPS = 7
looks = st.tuples(st.integers(0, 6), st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 4), st.booleans())
def test_no_token_is_too_old_and_every_batch_is_trained_on_once_in_order(
    data: Any, max_staleness: int, is_dynamic: bool
) -> None:
    by_step = {step: data.draw(looks) for step in range(1, STEPS + 1)}
    rounds = {s: data.draw(st.integers(1, 3)) if is_dynamic else 1 for s in by_step}
    sampler, rows = Sampler(by_step, rounds, config(3 if is_dynamic else 0)), list[Any]()
    pipeline = pipeline_of(sampler, Schedule(max_staleness, STEPS), rows)
    pipeline.synced(0, 1)
    drawn = 0
    for step in range(1, STEPS + 1):
        sampled, metrics = pipeline.take(step, StepTimer())
        assert metrics["of"] == step
        assert metrics["rollout/staleness_max"] <= max_staleness
        ages = [step - 1 - (version - 1) for version in sampled.batch.token_versions[::3].tolist()]
        assert metrics["rollout/staleness"] == pytest.approx(sum(ages) / len(ages))
        assert min(ages) >= 0
        assert pipeline.token_ages(step, sampled.batch)[::3].tolist() == ages
        drawn += rounds[step]
        assert pipeline.cursor == {"drawn": drawn}  # as if nothing had been drawn ahead
        if max_staleness == 0:
            assert sampler.prompts.drawn == drawn
        for _ in range(data.draw(st.integers(0, 8))):  # the policy is waited for
            if pipeline.is_ahead:
                pipeline.work()
        sampler.generator.lost = data.draw(st.booleans())
        pipeline.drain()
        assert not sampler.generator.is_generating
        sampler.generator.lost = False
        sampler.generator.version += 1
        pipeline.synced(step, sampler.generator.version)
    started = [row for row in rows if row["event"] == "started"]
    assert [row["step"] for row in started] == list(range(1, STEPS + 1))
    assert all(0 <= row["age"] <= max_staleness for row in started)
    trained = [row for row in rows if row["event"] == "trained"]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    tokens = [sum(row["tokens_by_age"].values()) for row in trained]
    assert tokens == [2 * rounds[row["step"]] for row in trained]


def test_a_recorded_schedule_is_kept() -> None:
    by_step = dict.fromkeys(range(1, STEPS + 1), (1, 0))
    recorded = {1: 0, 2: 1, 3: 1, 4: 1, 5: 4, 6: 4, 7: 4}
    sampler, rows = Sampler(by_step, dict.fromkeys(by_step, 1), config(0)), list[Any]()
    pipeline = pipeline_of(sampler, Schedule(2, STEPS, recorded), rows)
    pipeline.synced(0, 1)
    for step in by_step:
        pipeline.take(step, StepTimer())
        for _ in range(5):
            pipeline.work()
        pipeline.drain()
        sampler.generator.version += 1
        pipeline.synced(step, sampler.generator.version)
    assert recorded_starts(rows) == recorded


def test_only_the_batch_that_is_asked_for_is_waited_for() -> None:
    sampler = Sampler({1: (3, 0), 2: (9, 0)}, {1: 1, 2: 1}, config(0))
    pipeline = pipeline_of(sampler, Schedule(1, 2), [])
    pipeline.synced(0, 1)
    timer = StepTimer()
    pipeline.take(1, timer)
    assert timer.metrics().keys() >= {"time/generate", "time/reward"}
    assert 0.0 in sampler.patience and 0.1 in sampler.patience
    sampler.patience.clear()
    pipeline.work()
    assert sampler.patience == [0.0]


def test_what_was_started_is_aborted_at_the_end() -> None:
    sampler = Sampler({1: (0, 0), 2: (9, 0), 3: (9, 0)}, {1: 1, 2: 1, 3: 1}, config(0))
    pipeline = pipeline_of(sampler, Schedule(2, 3), [])
    pipeline.synced(0, 1)
    pipeline.take(1, StepTimer())
    pipeline.close()
    assert sampler.closed == [2, 3]


def test_without_running_ahead_older_weights_start_no_other_batch() -> None:
    """``trainer.sync_every=3``: the bound allows older ones, and nobody asked for them yet."""
    sampler, rows = Sampler({1: (0, 0), 2: (0, 0)}, {1: 1, 2: 1}, config(0)), list[Any]()
    pipeline = pipeline_of(sampler, Schedule(2, 2), rows, is_ahead=False)
    pipeline.synced(0, 1)
    pipeline.take(1, StepTimer())
    assert [row["step"] for row in rows] == [1, 1]
    _, metrics = pipeline.take(2, StepTimer())
    assert metrics["rollout/staleness"] == 1.0


def test_the_age_at_admission_is_that_at_training() -> None:
    assert Admission(step=5, after=4).age == 0
    assert Schedule(1, 9).admit(6, 4, is_wanted=True) == Admission(6, 4)
    assert Schedule(1, 9).admit(6, 4, is_wanted=False) is None
    assert Schedule(1, 9).admit(7, 4, is_wanted=True) is None
    assert Schedule(9, 6).admit(7, 6, is_wanted=True) is None  # the run ends before
    assert Schedule(1, 9, {6: 4}).admit(6, 4, is_wanted=False) == Admission(6, 4)
    assert Schedule(1, 9, {6: 5}).admit(6, 4, is_wanted=True) is None


def test_engines_without_room_get_no_further_batch() -> None:
    looks = {1: (1, 0), 2: (50, 0), 3: (50, 0), 4: (50, 0)}
    for capacity, after_first in ((1, [1, 2]), (2, [1, 2, 3]), (99, [1, 2, 3, 4])):
        sampler, rows = Sampler(looks, dict.fromkeys(looks, 1), config(0)), list[Any]()
        pipeline = pipeline_of(sampler, Schedule(3, 4), rows, capacity=capacity)
        pipeline.synced(0, 1)
        pipeline.take(1, StepTimer())
        assert [row["step"] for row in rows if row["event"] == "started"] == after_first


def test_a_policy_that_is_behind_gets_no_further_batch() -> None:
    looks = dict.fromkeys(range(1, 6), (1, 0))
    sampler, rows = Sampler(looks, dict.fromkeys(looks, 1), config(0)), list[Any]()
    pipeline = pipeline_of(sampler, Schedule(9, 5), rows, capacity=1)
    pipeline.synced(0, 1)
    for step in (1, 2):
        pipeline.take(step, StepTimer())
        for _ in range(20):
            pipeline.work()
        started = [row["step"] for row in rows if row["event"] == "started"]
        assert started == list(range(1, step + 2))  # one is ready, and waits


def test_busy_time_is_what_was_seen_between_two_looks() -> None:
    at = iter([0.0, 1.0, 3.0, 4.0, 6.0, 10.0])
    busy = BusyTime(lambda: next(at))
    for is_busy in (False, True, True, False):
        busy.look(is_busy)
    assert busy.take_fraction() == pytest.approx(3 / 4)
    busy.look(True)
    busy.look(False)
    assert busy.take_fraction() == pytest.approx(4 / 6)


def settings_with(path: Path, **more: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"schedule": str(path), "max_staleness": 1, **more})


def test_a_schedule_is_read_and_what_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "schedule.jsonl"
    with pytest.raises(ValueError, match=r"expected the schedule\.jsonl of a run"):
        make_schedule(settings_with(file))
    rows: list[dict[str, Any]] = [
        {"step": 1, "event": "started", "after": 0, "age": 0},
        {"step": 2, "event": "started", "after": 0, "age": 1},
        {"step": 1, "event": "trained", "tokens_by_age": {"0": 9}},
        {"step": 2, "event": "started", "after": 1, "age": 0},  # a resumed run did it again
    ]
    write(file, rows)
    assert make_schedule(settings_with(file)).recorded == {1: 0, 2: 1}
    for row, said in (
        ({"step": 3, "reward/mean": 1.0}, "line 5: expected an event, started or trained"),
        ({"step": 3, "event": "started", "after": 3}, "line 5: expected a step and the earlier"),
        ({"step": 3, "event": "started", "after": "2"}, "line 5: expected a step and the earlier"),
        ({"step": 5, "event": "started", "after": 2}, "the batch of step 5 was 2 steps old"),
    ):
        write(file, [*rows, row])
        with pytest.raises(ValueError, match=said):
            make_schedule(settings_with(file))


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
