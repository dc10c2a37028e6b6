"""A run whose checkpoints are written beside it is the same run, also when a rank is killed while
one may be pending."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.reliability.cases import STEPS, overrides_of, write_reward
from tests.reliability.same_run import differences
from tests.reliability.whole_run import LIMIT_S, WholeRun

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]
CASE = "grpo_r3", 2
"""The reference is refreshed, and saved, too."""
KEPT = "RLTRAIN_BACKGROUND_DIR"
"""This variable names a folder to keep the runs in."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WholeRun, WholeRun]]:
    """A straight run with checkpoints at once, and one beside, of which a rank is killed after
    step 3."""
    kept = os.environ.get(KEPT)
    work = tmp_path_factory.mktemp("background") if kept is None else Path(kept)
    work.mkdir(parents=True, exist_ok=True)
    write_reward(work)
    straight = WholeRun(work, work / "straight", overrides_of(*CASE))
    try:
        straight.wait()
        beside = WholeRun(
            work, work / "beside", [*overrides_of(*CASE), "checkpoint.asynchronous=true"]
        )
        try:
            kill_rank_after(beside, 3)
            beside.wait()
            yield straight, beside
        finally:
            beside.end()
    finally:
        straight.end()
        if kept is None:
            shutil.rmtree(work)


def kill_rank_after(run: WholeRun, step: int) -> None:
    until = time.monotonic() + LIMIT_S
    while step not in run.steps:
        assert run.process.poll() is None, f"it ended before step {step}:\n{run.output}"
        assert time.monotonic() < until, f"no step {step}:\n{run.output}"
        time.sleep(0.02)
    ranks = []
    for child in psutil.Process(run.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if "ray::ModelActor" in " ".join(child.cmdline()):
                ranks.append(child)
    assert len(ranks) == CASE[1], ranks
    ranks[-1].send_signal(signal.SIGKILL)


def test_it_ends_as_the_straight_one(runs: tuple[WholeRun, WholeRun]) -> None:
    straight, beside = runs
    assert "All parts start again from the checkpoint of step" in beside.output
    assert not differences(straight.folder, beside.folder, STEPS)


def test_a_checkpoint_is_pending_as_its_step_ends_or_there(
    runs: tuple[WholeRun, WholeRun],
) -> None:
    for run, beside in zip(runs, (False, True), strict=True):
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines][1:]
        found = [row.get("checkpoint/pending") for row in rows]
        assert found[-1] == (0.0 if beside else None)
        assert set(found) <= ({0.0, 1.0} if beside else {None})
        assert all(row["time/checkpoint"] > 0 for row in rows)
