"""A run's folder is held by one process, and by none that is gone."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rltrain.actors import run_lock as module
from rltrain.actors.run_lock import NAME, run_lock

HOLDER = """
import os, sys, time
from pathlib import Path
from rltrain.actors.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    if sys.argv[2:] and not os.fork():
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def test_a_second_run_is_told_who_holds_the_folder_and_a_dead_one_holds_nothing(
    tmp_path: Path,
) -> None:
    with holder(tmp_path) as first:
        said = rf"found the run of process {first.pid} on \S+, started at 20.* UTC: .*\[RL6016\]$"
        with pytest.raises(ValueError, match=said), run_lock(tmp_path):
            pass
        assert json.loads((tmp_path / NAME).read_text())["pid"] == first.pid
        first.kill()
        first.wait()
        with run_lock(tmp_path):
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_the_holder_forked_does_not_go_on_holding_it(tmp_path: Path) -> None:
    with holder(tmp_path, "fork") as first:
        first.kill()
        first.wait()
        with run_lock(tmp_path):
            pass


def test_the_folder_is_there_only_if_the_run_wrote_to_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path / "a/b"):
        assert (tmp_path / "a/b").is_dir()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with run_lock(tmp_path / "a/b"):
        (tmp_path / "a/b/config.yaml").touch()
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["config.yaml"]


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = r"expected a folder that can be written, found: Not a directory.*\[RL6001\]$"
    with pytest.raises(ValueError, match=said), run_lock(tmp_path / "file/run"):
        pass


def test_a_lock_file_without_words_is_taken(tmp_path: Path) -> None:
    """Its holder was killed before it could write, or the disk was full."""
    for text in ("", '{"pid"', "[]", '"x"'):
        (tmp_path / NAME).write_text(text)
        with run_lock(tmp_path):
            pass


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a run on another host, where the file system passes no locks on."""
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "STALE_S", 0.6)
    about = {"pid": 7, "host": "far", "boot": "another", "started": "then"}
    (tmp_path / NAME).write_text(json.dumps(about))
    return tmp_path


def test_a_run_elsewhere_holds_the_folder_while_its_heart_beats(elsewhere: Path) -> None:
    ended = threading.Event()
    file = os.open(elsewhere / NAME, os.O_RDWR)
    beat = threading.Thread(target=module._beat, args=(file, ended), daemon=True)
    beat.start()
    said = r"process 7 on far, started at then: .*RL6016"
    with pytest.raises(ValueError, match=said), run_lock(elsewhere):
        pass
    ended.set()
    beat.join()
    began = time.monotonic()
    with run_lock(elsewhere):
        assert time.monotonic() - began > 0.3  # the last beat was just now
    os.close(file)


def test_a_run_elsewhere_that_is_long_gone_does_not_delay(elsewhere: Path) -> None:
    os.utime(elsewhere / NAME, (0, 0))
    began = time.monotonic()
    with run_lock(elsewhere):
        assert time.monotonic() - began < 0.5


def test_a_file_system_without_locks_goes_by_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "STALE_S", 5)
    said = rf"process {os.getpid()} on .*RL6016"
    with run_lock(tmp_path), pytest.raises(ValueError, match=said), run_lock(tmp_path):
        pass
