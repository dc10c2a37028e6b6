"""Checkpoints in the background: when they count, what they hold, and what is left of them.

A stand-in for the ranks holds a number and has written after so many questions. Megatron's ranks:
tests/distributed/test_background_save.py; whole runs: tests/reliability/test_background_runs.py.
"""

import errno
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from rltrain.actors.failures import ActorFailed
from rltrain.config import Config
from rltrain.controller.checkpoint_space import DiskFull
from rltrain.controller.choose_checkpoint import Choice, require
from rltrain.controller.run_checkpoint import checkpoints, last_weights, read_state, step_of
from rltrain.controller.save_checkpoint import begin_save, finish_save
from rltrain.controller.saver import Saver
from rltrain.tracking.jsonl import read_jsonl
from rltrain.weights.huggingface.manifest import check_manifest
from tests.unit.controller.test_checkpoint_storage import B, C, start
from tests.unit.controller.test_checkpoint_storage import Group as RanksOnHosts
from tests.unit.controller.test_crashes import Accuracy, Model, Run, start_or_go_on
from tests.unit.controller.test_run_checkpoint import STATE, Group, names, opened, storage, written

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


class Background(Model):
    """Writes what it held when the checkpoint was begun, once it was asked ``lag`` times."""

    def __init__(self, value: int = 0, error: Exception | None = None, lag: int = 1) -> None:
        super().__init__(value, error)
        self.lag = lag
        self.begun: Path | None = None
        self.dropped = 0

    def begin_save(self, checkpoint: Path) -> None:
        assert self.begun is None, "one at a time"
        self.begun, self.held, self.asked = checkpoint, self.value, 0

    def is_written(self, limit_s: float | None = None) -> bool:
        if isinstance(self.error, ActorFailed):
            raise self.error
        self.asked += 1
        return self.asked > self.lag

    def end_save(self) -> Any:
        assert self.begun is not None
        folder, self.begun = self.begun, None
        return Group(self.held, self.error).save(folder)

    def drop_save(self) -> None:
        self.begun, self.dropped = None, self.dropped + 1


def saver(run: Path, group: Group, **settings: Any) -> Saver:
    given: Any = (storage(run, asynchronous=True, **settings), [group])
    return Saver(*given, lambda: 0, {})


def saved(run: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(run)]


def test_a_checkpoint_counts_once_it_is_written_and_holds_its_step(tmp_path: Path) -> None:
    group = Background(7, lag=1)
    on = saver(tmp_path, group)
    kept: dict[str, Any] = {**STATE, "skipped": 0}
    on.save(1, kept, at_once=False)
    group.learn()
    assert saved(tmp_path) == [] and on.steps == [1]
    on.finish(waits=False)
    assert saved(tmp_path) == []
    on.finish(waits=False)
    assert saved(tmp_path) == [1] and on.pending is None
    (path,) = checkpoints(tmp_path)
    assert opened(path, tmp_path) == 7
    assert read_state(path) == {"step": 1, **kept}
    check_manifest(path)
    assert names(tmp_path) == ["step_000001"]


def test_what_is_kept_is_that_of_the_beginning(tmp_path: Path) -> None:
    """What a run changes in place is none of the checkpoint."""
    on, kept = saver(tmp_path, Background()), {"prompts": {"position": 5}}
    on.save(1, kept, at_once=False)
    kept["prompts"]["position"] = 6
    on.finish()
    assert read_state(checkpoints(tmp_path)[0])["prompts"] == {"position": 5}


def test_the_next_one_waits_for_it(tmp_path: Path) -> None:
    group = Background(1, lag=100)
    on = saver(tmp_path, group, keep=2)
    for step in (1, 2, 3):
        group.value = step
        on.save(step, STATE, at_once=False)
        assert saved(tmp_path) == [1, 2][: step - 1] and on.steps[-1] == step
    on.save(4, STATE)
    assert saved(tmp_path) == [3, 4]
    assert [opened(path, tmp_path) for path in checkpoints(tmp_path)] == [3, 3]


@pytest.mark.parametrize("lag", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_leaves_what_a_synchronous_one_leaves(
    lag: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accuracy, "is_due", lambda self, step: True)
    settings = {"keep": 1, "keep_best": 1, "best_mode": "min"}  # the first is the best
    for name in ("at once", "beside"):
        (tmp_path / name).mkdir()
    start_or_go_on(tmp_path / "at once", every, **settings)
    start_or_go_on(tmp_path / "beside", every, Background(lag=lag), asynchronous=True, **settings)
    assert names(tmp_path / "beside") == names(tmp_path / "at once")
    for one, other in zip(*(checkpoints(tmp_path / n) for n in ("at once", "beside")), strict=True):
        assert opened(one, tmp_path / "at once") == opened(other, tmp_path / "beside")
        states = [read_state(path) for path in (one, other)]
        for state in states:
            del state["config"]
            state["metrics"].pop("time/checkpoint", None)
        assert states[0] == states[1]
    last = last_weights(tmp_path / "beside")
    assert last is not None and last.resolve() == checkpoints(tmp_path / "beside")[-1].resolve()
    pending = [
        row.get("checkpoint/pending") for row in read_jsonl(tmp_path / "beside/metrics.jsonl")
    ]
    assert pending[0] is None and pending[-1] == 0.0
    assert (1.0 in pending) == (lag > 0)


def test_a_disk_that_is_full_at_the_end_leaves_the_older_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, 1)
    group = Background()
    on = saver(tmp_path, group, on_full="skip")
    on.save(2, STATE, at_once=False)
    group.error = NO_SPACE
    with caplog.at_level(logging.WARNING):
        on.finish()
    assert "NO CHECKPOINT of step 2, 1 left out so far" in caplog.text
    assert names(tmp_path) == ["step_000001"] and on.pending is None and on.skipped == 1
    group.error = None
    on.save(3, STATE)
    assert saved(tmp_path) == [1, 3]


def test_it_ends_the_run_unless_it_is_to_skip(tmp_path: Path) -> None:
    on = saver(tmp_path, Background(error=NO_SPACE))
    on.save(2, STATE, at_once=False)
    with pytest.raises(DiskFull, match=r"(?s)checkpoint of step 2 not written to .*Older checkp"):
        on.finish()
    assert names(tmp_path) == [] and on.pending is None


def test_ranks_hold_nothing_of_what_found_no_room_at_its_beginning(tmp_path: Path) -> None:
    class Full(Background):
        def begin_save(self, checkpoint: Path) -> None:
            raise NO_SPACE

    first, second = Background(), Full()
    with pytest.raises(DiskFull, match="step 2 not written"):
        begin_save(storage(tmp_path), 2, cast(Any, [first, second]), STATE)
    assert first.dropped == second.dropped == 1
    assert names(tmp_path) == []


@dataclass
class Ended:
    """A run in which something happens while the checkpoint of step 2 is written."""

    folder: Path
    group: Background

    def end_in_step_3(self, error: BaseException, **settings: Any) -> None:
        take = Run.take

        def take_or_end(run: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            if step == 3:
                assert run.saver.pending is not None and run.saver.pending.step == 2
                raise error
            return take(run, step, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "take", take_or_end)
            with pytest.raises(type(error)):
                start_or_go_on(self.folder, 1, self.group, asynchronous=True, **settings)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the reward")], ids=repr)
def test_a_run_that_ends_waits_for_what_it_has_begun(error: BaseException, tmp_path: Path) -> None:
    Ended(tmp_path, Background(lag=100)).end_in_step_3(error)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert opened(checkpoints(tmp_path)[-1], tmp_path) == 2


def test_a_rank_that_is_gone_leaves_the_older_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = Background(lag=100)
    died = ActorFailed("died", "policy.update", "policy worker 0 died")

    learn = group.learn

    def learn_or_die() -> None:
        learn()
        if group.value == 3:
            group.error = died
            raise died

    group.learn = learn_or_die  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING), pytest.raises(ActorFailed, match="policy worker 0"):
        start_or_go_on(tmp_path, 1, group, asynchronous=True)
    assert "no checkpoint of step 2: policy.update" in caplog.text
    assert names(tmp_path) == ["step_000001"]
    start_or_go_on(tmp_path, 1, Background(), asynchronous=True)
    assert saved(tmp_path) == [2, 3] and opened(checkpoints(tmp_path)[-1], tmp_path) == 3


class RanksInBackground(RanksOnHosts):
    def begin_save(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def is_written(self, limit_s: float | None = None) -> bool:
        return True

    def end_save(self) -> Any:
        return self.save(self.checkpoint)


@pytest.mark.parametrize("is_remote", [False, True])
def test_on_disks_of_nodes_and_below_a_url(is_remote: bool, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}" if is_remote else None
    run = start(tmp_path, url=url)
    group = RanksInBackground(run.hosts, [B, C], "step 1")
    pending = begin_save(run.storage, 1, cast(Any, [group]), {})
    assert checkpoints(run.storage.run_dir) == []
    assert not (tmp_path / "bucket/step_000001/manifest.json").exists()
    finish_save(pending)
    assert run.load([C]) == "step 1 of 0 and step 1 of 1"
    assert (tmp_path / "bucket/step_000001/manifest.json").exists() == is_remote


@pytest.mark.parametrize(
    ("row", "is_error"),
    [
        ({"step": 9}, False),
        ({"step": 10}, True),
        ({"step": 10, "checkpoint/pending": 0.0}, True),
        ({"step": 10, "checkpoint/pending": 1.0}, False),
        ({"step": 19, "checkpoint/pending": 1.0}, False),
        ({"step": 20, "checkpoint/pending": 1.0}, True),
    ],
)
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    row: dict[str, float], is_error: bool, tmp_path: Path
) -> None:
    """And one whose checkpoints were removed does not."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    trainer = {"output_dir": str(tmp_path), "resume": "auto"}
    config = Config.model_validate({"trainer": trainer, "checkpoint": {"every": 10}})
    if not is_error:
        return require(config, Choice(None))
    with pytest.raises(ValueError, match="RL6014"):
        require(config, Choice(None))
