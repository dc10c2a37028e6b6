"""How a run fails: one message, its exit status, and what it leaves, whatever the error was."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rltrain.actors.failures import ActorFailed
from rltrain.main import main
from rltrain.tracking.tracker import write_outcome

SECRET = "abcdef0123456789"


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run in ``tmp_path`` whose training ends with the given error, or calls the function."""

    def run(error: Any) -> int:
        def train(*_: Any) -> None:
            if isinstance(error, BaseException):
                raise error
            error()

        def preflight(config: Any) -> None:
            Path(config.trainer.output_dir).mkdir(exist_ok=True)

        monkeypatch.setenv("WANDB_API_KEY", SECRET)
        monkeypatch.setattr("rltrain.controller.checks.preflight.preflight", preflight)
        monkeypatch.setattr("rltrain.controller.rl.run", train)
        before = signal.getsignal(signal.SIGTERM)
        try:
            return main(["+recipe=grpo_moe_r3", f"trainer.output_dir={tmp_path}/run"])
        finally:
            signal.signal(signal.SIGTERM, before)

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


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_ends_a_run_with_its_status(
    number: signal.Signals,
    name: str,
    failing: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    closed = []

    def train() -> None:
        try:
            signal.raise_signal(number)
        finally:
            closed.append(True)

    assert failing(train) == 128 + number
    assert closed
    shown = capsys.readouterr().err
    assert f"rltrain: ended by {name}" in shown and "Traceback" not in shown
    assert json.loads((tmp_path / "run/outcome.json").read_text())["state"] == "failed"


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
