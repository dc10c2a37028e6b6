"""A disk that is full, or becomes so: a sentence in the terminal, and never another error."""

import logging
from pathlib import Path

import pytest

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.tracker import Tracker
from tests.small_disk import on_small_disk

FILL = """
def fill():
    with (DISK / "full").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(512))
            except OSError:
                return
"""
START = (
    FILL
    + """
import rltrain.controller.checks.preflight as checks
from rltrain.main import main

checks.preflight = lambda config: fill()
print(main(["+recipe=grpo_moe_r3", f"trainer.output_dir={DISK}/run"]))
"""
)
END = (
    FILL
    + """
import tempfile
from rltrain.cli.failure import fail, keep_traceback
from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.tracker import Tracker

tempfile.tempdir = str(DISK)
try:
    with Tracker(DISK, TrackingConfig(backends=[]), {}, {}, num_steps=3) as tracker:
        fill()
        raise RuntimeError("the engine died")
except RuntimeError as error:
    print(fail(f"stopped ({keep_traceback(DISK)})", error, 1))
"""
)


def test_a_run_that_starts_on_a_full_disk_says_so_in_a_sentence() -> None:
    said = on_small_disk(START, 64)
    assert "rltrain: cannot start\n  the disk that holds " in said
    assert "/run/config.yaml is full: free some space, or choose another folder" in said
    assert "[RL6005]" in said and "Errno" not in said and "Traceback" not in said
    assert said.startswith("1\n")


def test_the_error_that_ended_a_run_is_shown_where_nothing_can_be_written() -> None:
    said = on_small_disk(END, 64)
    assert "stopped (RLTRAIN_DEBUG=1 shows the details)\n  the engine died\n" in said
    assert "after the error that ended the run: " in said and "outcome.json is full" in said
    assert "Traceback" not in said


def test_a_run_without_an_error_needs_its_outcome_and_not_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def tracker(name: str) -> Tracker:
        (tmp_path / name).mkdir()
        return Tracker(tmp_path / name, TrackingConfig(backends=[]), {}, {}, num_steps=1)

    monkeypatch.setattr("rltrain.tracking.tracker.write_report", full)
    with caplog.at_level(logging.WARNING):
        tracker("a").finish()
    assert "no report.html: [Errno 28] No space left on device" in caplog.text
    monkeypatch.setattr("rltrain.tracking.tracker.write_outcome", full)
    with pytest.raises(OSError, match="No space left"):
        tracker("b").finish()
