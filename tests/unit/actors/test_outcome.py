"""outcome.json of a run that was killed: what it says, and when it is left alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rltrain.actors.outcome import OUTCOME, is_locked, write_killed
from rltrain.config import Config
from rltrain.controller.run_loop import is_finished
from rltrain.tracking.report import write_report
from rltrain.tracking.report.run_folder import read_run

HOLDER = """
import sys
from pathlib import Path
from rltrain.actors.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        (None, None),
        ("", None),
        ('{"step": 0}\n{"step": 1}\n', 1),
        ('{"step": 3}\n{"step": 4, "rew', 3),
        ('{"step": 3}\n\0\0\n', 3),
    ],
)
def test_it_says_the_last_step_and_how_to_go_on(
    metrics: str | None, step: int | None, tmp_path: Path
) -> None:
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    assert write_killed(tmp_path, time.time())
    outcome = json.loads((tmp_path / OUTCOME).read_text())
    assert (outcome["state"], outcome["step"]) == ("killed", step)
    assert "trainer.resume=auto" in outcome["error"] and "ended" in outcome


def test_what_the_run_wrote_itself_stays_and_what_is_older_does_not(tmp_path: Path) -> None:
    (tmp_path / OUTCOME).write_text('{"state": "failed"}')
    assert not write_killed(tmp_path, time.time() - 60)
    assert "failed" in (tmp_path / OUTCOME).read_text()
    os.utime(tmp_path / OUTCOME, (1, 1))
    assert write_killed(tmp_path, time.time())
    assert "killed" in (tmp_path / OUTCOME).read_text()


def test_the_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "held\n"
        assert is_locked(tmp_path)
        assert not write_killed(tmp_path, time.time()) and not (tmp_path / OUTCOME).exists()
        holder.kill()
        holder.stdin.close()
    assert not is_locked(tmp_path)  # the file is there, and nobody holds it
    assert (tmp_path / "run.lock").exists() and write_killed(tmp_path, time.time())


def test_the_report_shows_it_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    write_killed(tmp_path, time.time())
    assert read_run(tmp_path).outcome["state"] == "killed"
    write_report(tmp_path)
    assert "The run was killed after step 2." in (tmp_path / "report.html").read_text()
    values = {"trainer": {"output_dir": str(tmp_path), "resume": "auto"}}
    assert not is_finished(Config.model_validate(values))
