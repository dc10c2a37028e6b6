"""How a run fails: one message, its exit status, and what it leaves, whatever the error was."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from rltrain.actors.failures import ActorFailed
from rltrain.actors.interrupts import closing_on_signals, signals_held
from rltrain.cli.going_on import resume_command
from rltrain.cli.typed_command import program
from rltrain.controller.run_data import RunData
from rltrain.main import compose, main
from rltrain.tracking.tracker import write_outcome

ARGUMENTS = ["+recipe=grpo_moe_r3", "checkpoint.every=4", "trainer.max_restarts=0"]
SECRET = "abcdef0123456789"


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run in ``tmp_path`` whose training ends with the given error, or calls the function."""

    def run(error: Any) -> int:
        def train(*_: Any) -> None:
            if isinstance(error, BaseException):
                raise error
            error()

        def preflight(config: Any) -> RunData:
            Path(config.trainer.output_dir).mkdir(exist_ok=True)
            return RunData()

        monkeypatch.setenv("WANDB_API_KEY", SECRET)
        monkeypatch.setattr("rltrain.controller.checks.preflight.preflight", preflight)
        monkeypatch.setattr("rltrain.controller.rl.run", train)
        return main([*ARGUMENTS, f"trainer.output_dir={tmp_path}/run"])

    return run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("who"), "KeyError: 'who'"),
        (AssertionError("two"), "AssertionError: two"),
        (ValueError("bad value"), "\n  bad value"),
        (
            ActorFailed("died", "policy.update", "policy worker 3 died"),
            "\n  policy.update: policy w",
        ),
        (RuntimeError(f"\x1b[31mred\x1b[0m, key {SECRET}"), "\n  red, key [redacted]"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ConnectionError("http://me:secret@host is down"), "http://[redacted]@host is down"),
    ],
)
def test_any_error_is_one_message_and_leaves_its_traceback_and_a_report(
    error: Exception,
    said: str,
    failing: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failing(error) == 1
    run = tmp_path / "run"
    shown = capsys.readouterr().err
    assert f"rltrain: stopped ({run}/error.log has the details)\n" in shown
    assert said in shown and "Traceback" not in shown
    log, outcome = (run / "error.log").read_text(), json.loads((run / "outcome.json").read_text())
    assert "Traceback" in log and type(error).__name__ in log
    assert outcome["state"] == "failed" and outcome["error"].startswith(type(error).__name__)
    page = (run / "report.html").read_text()
    assert "The run failed." in page and type(error).__name__ in page
    for text in (shown, log, outcome["error"], page):
        assert SECRET not in text and "me:secret" not in text and "\x1b" not in text


def test_a_run_holds_its_folder(
    failing: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From before anything is read or written there to its end; another process is told so."""
    typed = ["train", *ARGUMENTS, "trainer.resume=auto", f"trainer.output_dir={tmp_path}/run"]
    second = []

    def train() -> None:
        command = [sys.executable, "-m", "rltrain.cli.app", *typed]
        second.append(subprocess.run(command, capture_output=True, text=True, timeout=60))

    assert failing(train) == 0
    assert second[0].returncode == 2
    said = f"found the run of process {os.getpid()} on "
    assert said in second[0].stderr and "RL6016" in second[0].stderr
    assert not (tmp_path / "run/run.lock").exists()


def test_the_trackers_own_report_is_left_as_it_is(failing: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def tracked() -> None:
        write_outcome(run, ValueError("as the tracker says"))
        raise ValueError("as main says")

    assert failing(tracked) == 1
    assert "as the tracker says" in (run / "outcome.json").read_text()
    os.utime(run / "outcome.json", (1, 1))  # of an earlier run in the same folder
    assert failing(ValueError("as main says")) == 1
    assert "as main says" in (run / "outcome.json").read_text()


SIGNALS = [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C (SIGINT)")]


@pytest.mark.parametrize("by_ray", [False, True])
@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_a_signal_ends_a_run_with_its_status(
    number: signal.Signals,
    name: str,
    by_ray: bool,
    failing: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    closed = []
    before = signal.getsignal(number)

    def train() -> None:
        (tmp_path / "run/metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if not by_ray:
                raise
            raise KeyboardInterrupt from None  # as a call into Ray does
        finally:
            closed.append(True)

    assert failing(train) == 128 + number
    assert closed and signal.getsignal(number) is before
    shown = capsys.readouterr().err
    assert "rltrain: interrupted at step 3; no checkpoint was saved" in shown
    assert "checkpoint.every=4 saves after step 4" in shown and "Traceback" not in shown
    outcome = json.loads((tmp_path / "run/outcome.json").read_text())
    assert (outcome["state"], outcome["step"], outcome["error"]) == ("interrupted", 3, name)
    assert "The run was interrupted at step 3." in (tmp_path / "run/report.html").read_text()


def test_an_interrupted_run_says_how_to_go_on(
    failing: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        saved = tmp_path / "run/checkpoints/step_000004"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        (tmp_path / "run/metrics.jsonl").write_text('{"step": 5}\n')
        raise KeyboardInterrupt

    assert failing(train) == 130
    typed = shlex.join(["rltrain", "train", *ARGUMENTS])
    going_on = f"{typed} trainer.resume=auto trainer.output_dir={tmp_path}/run"
    said = "interrupted at step 5, with a checkpoint of step 4; resume with"
    assert f"rltrain: {said}\n  {going_on}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["plain", "a b", "it's", "a=b,c", "back\\slash", "end\\", "\\'", "~user", "{x}"]
)
def test_the_folder_to_go_on_in_is_one_that_hydra_reads(name: str, tmp_path: Path) -> None:
    typed = ["+recipe=sft_tiny", "trainer.output_dir=old", "++trainer.resume=never"]
    command = shlex.split(resume_command(typed, tmp_path / name))
    assert command[:3] == ["rltrain", "train", "+recipe=sft_tiny"] and len(command) == 5
    trainer = compose(command[2:]).trainer
    assert (trainer.output_dir, trainer.resume) == (f"{tmp_path / name}", "auto")


def test_a_signal_waits_for_the_end_of_what_is_held() -> None:
    after = []
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), closing_on_signals():
        with signals_held() as came:
            assert not came()
            signal.raise_signal(signal.SIGTERM)
            after.append(came())
        after.append("not here")
    assert after == [True]


TWICE = """
import subprocess, sys, time
from rltrain.actors.interrupts import closing_on_signals, last_act
child = [sys.executable, "-c", "import time; time.sleep(600)"]
with closing_on_signals(), last_act(lambda why: print("last act", flush=True)):
    nowhere = subprocess.DEVNULL
    started = subprocess.Popen(child, start_new_session=True, stdout=nowhere, stderr=nowhere)
    try:
        print(started.pid, flush=True)
        time.sleep(600)
    finally:
        print("closing", flush=True)
        time.sleep(600)  # as long as what was started does not answer
"""


def test_closing_that_takes_too_long_is_ended() -> None:
    script = TWICE.replace("closing_on_signals(), ", "closing_on_signals(), grace(0.5), ")
    command = [sys.executable, "-c", script.replace("import closing", "import grace, closing")]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout and process.stderr
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert process.stdout.read() == "closing\nlast act\n"
        assert "and not closed within trainer.grace_s: every process" in process.stderr.read()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_a_second_signal_ends_it_at_once_and_leaves_no_process(
    number: signal.Signals, name: str
) -> None:
    command = [sys.executable, "-c", TWICE]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout and process.stderr
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stdout.read() == "last act\n"
        shown = process.stderr.read()
    assert "interrupted: closing what was started" in shown and "Traceback" not in shown
    assert psutil.wait_procs([child], timeout=10)[1] == []


@pytest.mark.parametrize(
    ("process", "typed"),
    [
        ("python -m rltrain.main +a b=c", "python -m rltrain.main"),
        ("python3 -u -m rltrain.cli.app train +a b=c", "python3 -u -m rltrain.cli.app train"),
        ("/venv/bin/python /venv/bin/rltrain train +a b=c", "rltrain train"),
        ("/venv/bin/python ../other/rltrain train +a b=c", "../other/rltrain train"),
        ("python -m pytest tests", "rltrain train"),
        ("python notebook.py +a b=c", "rltrain train"),
    ],
)
def test_the_program_is_what_was_typed(process: str, typed: str, tmp_path: Path) -> None:
    for folder in ("/venv/bin", "../other"):
        process = process.replace(folder, str(tmp_path / folder.strip("./")))
        typed = typed.replace(folder, str(tmp_path / folder.strip("./")))
    for name in ("venv/bin", "other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "rltrain").touch()
    in_path = str(tmp_path / "venv/bin/rltrain")
    assert program(["+a", "b=c"], process.split(), lambda _: in_path) == typed.split()


def test_a_fault_in_the_checks_leaves_its_traceback_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def preflight(config: Any) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr("rltrain.controller.checks.preflight.preflight", preflight)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["+recipe=grpo_moe_r3"]) == 1
    shown = capsys.readouterr().err
    [log] = tmp_path.glob("rltrain-error-*.log")
    assert f"cannot start ({log} has the details)\n  KeyError: 'unforeseen'" in shown
    assert "Traceback" in log.read_text()


def test_a_full_disk_does_not_hide_the_error(
    failing: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def full() -> None:
        (run / "error.log").mkdir()  # cannot be written
        (run / "outcome.json").mkdir()
        raise ValueError("the first error")

    assert failing(full) == 1
    assert "the first error" in capsys.readouterr().err
