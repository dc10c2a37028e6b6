"""Room for checkpoints: looked for on every disk before, and what happens where there is none.

Several nodes, Megatron's ranks: tests/unit/controller/test_checkpoint_storage.py and
tests/distributed/test_full_disk.py.
"""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rltrain.actors import node_files
from rltrain.actors.failures import ActorFailed
from rltrain.config import Config
from rltrain.controller.checkpoint_space import (
    DiskFull,
    check_first_checkpoint,
    check_free,
    is_full,
    needed_by_disk,
    planned,
)
from rltrain.controller.checks.model_checks import read_model
from rltrain.controller.run_checkpoint import checkpoints
from rltrain.controller.save_checkpoint import save, save_last
from rltrain.tracking.jsonl import read_jsonl
from tests.small_disk import on_small_disk
from tests.unit.controller.test_checkpoint_storage import A, B, C, start
from tests.unit.controller.test_checkpoint_storage import Group as RanksOnHosts
from tests.unit.controller.test_crashes import Model, start_or_go_on
from tests.unit.controller.test_run_checkpoint import MODEL, STATE, Group, names, storage, written

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
SMALL_DISK = """
from tests.unit.controller.test_run_checkpoint import Group, STATE, opened, storage
from rltrain.controller.save_checkpoint import save
from rltrain.controller.run_checkpoint import checkpoints

for size in (20_000, 20_000, 90_000):
    try:
        save(storage(DISK, keep=1), size, [Group("1" * size)], STATE)
    except RuntimeError as error:
        print(type(error).__name__, error)
    (path,) = checkpoints(DISK)
    print(path.name, [at.name for at in path.parent.iterdir()], len(str(opened(path, DISK))))
(DISK / "filler").write_bytes(bytes(20_000))
try:
    save(storage(DISK, keep=1), 4, [Group("1" * 9)], STATE)
except RuntimeError as error:
    print("before:", error)
print([at.name for at in path.parent.iterdir()])
"""


def test_a_small_disk_keeps_the_old_checkpoint_and_nothing_else() -> None:
    said = on_small_disk("import sys; sys.set_int_max_str_digits(0)" + SMALL_DISK, 64)
    first, second, *full, third, before, takes, left = said.strip().splitlines()
    assert first == "step_020000 ['step_020000'] 20000"
    assert second == first
    assert full[0].startswith("DiskFull checkpoint of step 90000 not written to ")
    assert "No space left on device" in full[0] and third == first
    assert "expected room on the disk of" in before and "free. Free some space" in before
    assert before.startswith("before: checkpoint of step 4 not written")
    assert "(20," in takes and left == "['step_020000']"


def test_the_room_is_looked_for_before_a_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1)
    monkeypatch.setattr(node_files, "free_bytes", lambda folder: 10)
    silent = Group(2, AssertionError("it writes"))
    with pytest.raises(DiskFull, match=r"(?s)step 2 not written.*bytes\) needed, .*\(10 bytes\)"):
        save(storage(tmp_path), 2, [silent], STATE)  # type: ignore[list-item]
    other = storage(tmp_path / "other")
    for least in (11, 10):
        with pytest.raises(DiskFull if least > 10 else AssertionError):
            save(other, 2, [silent], STATE, least)  # type: ignore[list-item]
        with pytest.raises(DiskFull if least > 10 else AssertionError):
            save_last(other, 2, silent, MODEL, least)  # type: ignore[arg-type]
    assert names(tmp_path) == ["step_000001"]


def test_each_disk_needs_what_it_took_last_time_or_its_share_of_the_plan(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert needed_by_disk(run.storage, [B, C, B], 90) == {B: 60, C: 30}
    run.save(1, [B, C, B])
    took = needed_by_disk(run.storage, [B, C, B], 90)
    assert took.keys() == {A, B, C} and took[B] == 2 * took[C] == 22
    moved = needed_by_disk(run.storage, [A], 90)  # the ranks are elsewhere now
    assert moved == {A: sum(took.values())}
    with pytest.raises(DiskFull, match=rf"an export: .*found too little: on {B} .* needed") as full:
        check_free(run.hosts, tmp_path, {A: 1, B: 2**60}, "an export")
    assert f"on {A}" not in str(full.value)


def test_a_remote_checkpoint_is_shared_out_over_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "url").mkdir()
    run = start(tmp_path, url=(tmp_path / "url").as_uri())
    run.save(1, [B, C])
    needed = needed_by_disk(run.storage, [B, C], 0)
    assert needed.keys() == {B, C} and needed[B] == needed[C] > 0


def test_what_is_at_the_url_stays_where_there_is_no_room(tmp_path: Path) -> None:
    (tmp_path / "url").mkdir()
    run = start(tmp_path, url=(tmp_path / "url").as_uri())
    ranks: Any = RanksOnHosts(run.hosts, [B, C])
    save_last(run.storage, 1, ranks, MODEL)
    before = sorted(path for path in (tmp_path / "url").rglob("*"))
    with pytest.raises(DiskFull, match="found too little"):
        save_last(run.storage, 2, ranks, MODEL, 2**60)
    assert sorted(path for path in (tmp_path / "url").rglob("*")) == before
    with pytest.raises(DiskFull, match="step 3 not written"):
        run.save(3, [B, C], error=NO_SPACE)
    assert sorted(path for path in (tmp_path / "url").rglob("*") if path.is_file()) == [
        path for path in before if path.is_file()
    ]


def test_the_plan_is_about_14_bytes_per_parameter() -> None:
    config = Config()
    policy = planned(config, read_model(config))
    assert policy.weights == 2 * policy.parameters
    assert 13.9 < policy.whole / policy.parameters <= 14
    ppo = Config.model_validate({"algorithm": {"advantage": "gae"}})
    assert 1.5 < planned(ppo, read_model(ppo)).whole / policy.whole < 2
    refreshed = {"kl": {"coef": 0.1, "refresh_every": 5}}
    kept = Config.model_validate({"algorithm": refreshed})
    assert planned(kept, read_model(kept)).whole == policy.whole + policy.weights


def raised(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (NO_SPACE, True),
        (DiskFull("x"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (raised(RuntimeError("on node B"), NO_SPACE), True),
        (raised(ActorFailed("raised", "a", "b"), RayTaskError("f", "t", NO_SPACE)), True),
        (raised(ActorFailed("raised", "a", "b"), RayTaskError("f", "t", ValueError())), False),
        (ActorFailed("died", "policy.save", "No space left on device"), False),
    ],
)
def test_a_full_disk_is_known_behind_what_was_raised(error: Exception, full: bool) -> None:
    assert is_full(error) == full


class FullAtFirst(Model):
    """Finds a full disk in its first checkpoint."""

    def save(self, checkpoint: Path) -> Any:
        self.error = NO_SPACE if self.value == 1 else None
        return super().save(checkpoint)

    save_weights = save


def test_a_run_goes_on_without_a_checkpoint_and_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        start_or_go_on(tmp_path, 1, FullAtFirst(), on_full="skip")
    assert "NO CHECKPOINT of step 1, 1 left out so far" in caplog.text
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row.get("checkpoint/skipped") for row in rows] == [None, 1.0, 1.0, 1.0]
    assert [path.name for path in checkpoints(tmp_path)] == ["step_000002", "step_000003"]


def test_a_run_stops_unless_it_is_to_skip(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="step 1 not written"):
        start_or_go_on(tmp_path, 1, FullAtFirst())
    assert names(tmp_path) == []


class Full(Model):
    def save(self, checkpoint: Path) -> Any:
        raise NO_SPACE

    save_weights = save


def test_a_run_that_cannot_keep_its_last_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"step 3 not written to .*last"):
        start_or_go_on(tmp_path, 1, Full(), on_full="skip")


def test_a_run_without_room_for_a_checkpoint_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_on(free: int, **checkpoint: Any) -> None:
        monkeypatch.setattr(node_files, "free_bytes", lambda folder: free)
        config = Config.model_validate(
            {
                "checkpoint": checkpoint,
                "model": {"cache_dir": str(tmp_path / "models")},
                "policy": {"precision": {"params": "fp32"}},
            }
        )
        at = storage(tmp_path, **checkpoint)
        check_first_checkpoint(config, at, [at.driver])

    with pytest.raises(DiskFull, match=r"^the run's next checkpoint: .*\(9 bytes\) free"):
        start_on(9, every=1)
    start_on(2**40, every=1)
    start_on(9)  # none is ever written
    start_on(9, every=1, on_full="skip")
    start_on(9, every=1, url="memory://run")
