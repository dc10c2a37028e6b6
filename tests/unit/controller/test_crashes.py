"""A run is killed, or the power is cut, before any of its writes: the resumed run has the metrics
of every step once.

The models are stand-ins that hold a number; tests/integration has whole runs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from rltrain.config import Config
from rltrain.config.trainer import TrackingConfig
from rltrain.controller.checkpoint_storage import gather_records, local_storage
from rltrain.controller.find_checkpoint import examine
from rltrain.controller.restore_checkpoint import restore
from rltrain.controller.run_checkpoint import checkpoints, last_weights
from rltrain.controller.run_loop import Loop, Start, Step
from rltrain.tracking.jsonl import JsonlWriter, read_jsonl
from rltrain.tracking.timers import StepTimer
from rltrain.tracking.tracker import SAMPLE_COLUMNS, Tracker
from rltrain.weights.huggingface.identity import ModelIdentity
from tests.unit.controller.test_run_checkpoint import Group

STEPS = 3
MODEL = ModelIdentity(architecture="tiny", tokenizer="2", weights="3")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Killed(BaseException):
    """Nothing catches it, as nothing catches a SIGKILL."""


class Model(Group):
    def learn(self) -> None:
        self.value += 1


@dataclass
class Accuracy:
    """Evaluates every second step."""

    model: Model
    tracker: Tracker

    def is_due(self, step: int) -> bool:
        return step % 2 == 0

    def evaluate(self, step: int) -> dict[str, float]:
        self.tracker.samples(step, [dict.fromkeys(SAMPLE_COLUMNS, "x") | {"reward": 1}])
        return {"eval/accuracy": float(self.model.value)}


class NoSpeed:
    def metrics(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {}


class Run(Loop):
    def take(self, step: int, timer: StepTimer, *, is_first: bool) -> Step:
        cast(Model, self.policy).learn()
        self.tracker.rollouts(step, [{"answer": 1, "reward_parts": {}}])
        return Step(cast(Any, None), {"reward/mean": float(cast(Model, self.policy).value)}, [])

    def first_checks(self, taken: Step) -> list[Any]:
        return []

    def check_invariants(self, step: int, checks: Any) -> None:
        """There are none."""

    def state(self) -> dict[str, Any]:
        return {}


def start_or_go_on(folder: Path, every: int, model: Model | None = None, **settings: Any) -> None:
    config = Config.model_validate(
        {
            "trainer": {"output_dir": str(folder), "steps": STEPS, "resume": "auto"},
            "checkpoint": {"every": every, **settings},
        }
    )
    storage = local_storage(folder, config.checkpoint)
    gather_records(storage)
    model, start = model or Model(), Start(MODEL, storage)
    if saved := checkpoints(folder):
        record = examine(storage, saved[-1])
        restore(storage, record, [model])  # type: ignore[list-item]
        start = Start(MODEL, storage, record.step, record.state)
    first = start.after + 1 if start.after else 0
    tracker = Tracker(
        folder, TrackingConfig(backends=[]), {}, {}, num_steps=STEPS, first_step=first
    )
    given: Any = (config, None, model, None, NoSpeed(), Accuracy(model, tracker), tracker, start)
    Run(*given).train()


@dataclass
class Disk:
    """Counts what is written, and fails before the ``kill_at``-th time."""

    kill_at: int
    count: int = 0

    def __post_init__(self) -> None:
        self.flushed: dict[int, int] = {}
        """Bytes by inode."""

    def touch(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            raise Killed

    @contextmanager
    def watched(self) -> Iterator[None]:
        replace, write = os.replace, JsonlWriter.write

        def watched_fsync(file: int) -> None:
            self.touch()
            found = os.fstat(file)
            self.flushed[found.st_ino] = found.st_size

        def watched_replace(source: Path, target: Path) -> None:
            self.touch()
            replace(source, target)

        def watched_write(writer: JsonlWriter, step: int, values: Any) -> None:
            self.touch()
            write(writer, step, values)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", watched_fsync)
            patch.setattr(os, "replace", watched_replace)
            patch.setattr(JsonlWriter, "write", watched_write)
            yield

    def cut_power(self, folder: Path) -> None:
        """What was not flushed reads as NUL bytes."""
        for file in folder.glob("*.jsonl"):
            size, kept = file.stat().st_size, self.flushed.get(file.stat().st_ino, 0)
            os.truncate(file, kept)
            os.truncate(file, size)


def tear(folder: Path) -> None:
    for file in folder.glob("*.jsonl"):
        with file.open("ab") as opened:
            opened.write('{"step": 2, "reward/mean": "ä'.encode()[:-1])


class Beside(Model):
    """Has written what it was asked for in the step before, as it was then."""

    def begin_save(self, checkpoint: Path) -> None:
        self.begun = checkpoint, Group(self.value)
        self.asked = 0

    def is_written(self, limit_s: float | None = None) -> bool:
        self.asked += 1
        return self.asked > 1

    def end_save(self) -> Any:
        folder, group = self.begun
        return group.save(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("fault", "every"), [("kill", 1), ("torn line", 2), ("power cut", 1)])
def test_metrics_of_every_step_are_there_once_whenever_a_run_ends(
    fault: str, every: int, asynchronous: bool, tmp_path: Path
) -> None:
    kill_at, was_killed = 0, True
    while was_killed:
        kill_at += 1
        folder, disk, was_killed = tmp_path / str(kill_at), Disk(kill_at), False
        folder.mkdir()
        try:
            with disk.watched():
                start_or_go_on(folder, every, Beside(), asynchronous=asynchronous)
        except Killed:
            was_killed = True
        if fault == "torn line":
            tear(folder)
        if fault == "power cut":
            disk.cut_power(folder)
        start_or_go_on(folder, every, Beside(), asynchronous=asynchronous)
        check(folder)
    assert kill_at > 40


def check(folder: Path) -> None:
    rows = read_jsonl(folder / "metrics.jsonl")
    found = [(row["step"], row.get("reward/mean"), row.get("eval/accuracy")) for row in rows]
    assert found == [(0, None, 0.0), (1, 1.0, None), (2, 2.0, 2.0), (3, 3.0, None)]
    for name, steps in {"samples": [0, 2], "rollouts": [1, 2, 3]}.items():
        assert [row["step"] for row in read_jsonl(folder / f"{name}.jsonl")] == steps
    last = last_weights(folder)
    assert last is not None and last.resolve() == checkpoints(folder)[-1].resolve()
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert not any(name.startswith(".") for name in names)
