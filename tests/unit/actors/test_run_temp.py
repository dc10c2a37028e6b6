"""The temporary folder of a run."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rltrain.actors.run_temp import make_run_temp, own_token, temporary_files_in
from rltrain.controller.doctor.machine import LONGEST_PATH, RAY_PATH

SOCKET = "session_2026-11-30_15-23-08_440067_1234567/sockets/plasma_store"
"""Ray's longest."""


def test_it_is_for_this_user_alone_and_children_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setenv("RAY_TMPDIR", parent)
        monkeypatch.setenv("HOME", f"{parent}/home")
        before, found = os.environ.get("TMPDIR"), tempfile.gettempdir()
        temp = make_run_temp()
        assert temp.root.parent == Path(parent)
        assert stat.S_IMODE(temp.root.stat().st_mode) == 0o700
        with temporary_files_in(temp.files):
            code = "import tempfile, os; print(tempfile.gettempdir())"
            printed = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, check=True)
            assert printed.stdout.strip() == tempfile.gettempdir() == str(temp.files)
            assert own_token() == temp.root.name
        assert (os.environ.get("TMPDIR"), tempfile.gettempdir()) == (before, found)
        assert own_token() is None
        # What is compiled outlives it.
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{parent}/home/.cache/rltrain/inductor"


def test_two_runs_have_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("rltrain.actors.run_temp.LETTERS", "ab")
    assert len({make_run_temp().root for _ in range(10)}) == 10
    monkeypatch.setattr("rltrain.actors.run_temp.LETTERS", "a")
    (tmp_path / "rlaaaa").mkdir(exist_ok=True)
    with pytest.raises(FileExistsError, match="remove old ones"):
        make_run_temp()


def test_the_doctor_knows_how_long_the_paths_of_sockets_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    temp = make_run_temp()
    try:
        path = str(temp.ray / SOCKET)
    finally:
        temp.files.rmdir()
        temp.root.rmdir()
    assert len(path) - len("/tmp") == RAY_PATH
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(OSError, match="too long"):
            listener.bind("x" * (LONGEST_PATH + 1))
        listener.bind("x" * LONGEST_PATH)
