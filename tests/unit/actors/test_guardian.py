"""The guardian of a run that is killed, or that ends, without Ray."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

RUN = """
import os, subprocess, sys, tempfile
from pathlib import Path
from rltrain.actors.guardian import Guardian
from rltrain.actors.run_temp import make_run_temp, temporary_files_in
temp = make_run_temp()
guardian = Guardian(temp, Path(sys.argv[1]))
guardian.tell(secrets=["told-later-by-the-run"], raylet=2**22)
with temporary_files_in(temp.files):
    tempfile.mkstemp()
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
guardian.end()
print("ended", os.path.exists(temp.root), flush=True)
child.kill()
"""
GONE_S = 30.0


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("killed", [True, False])
def test_it_removes_what_is_left(killed: bool, tmp_path: Path) -> None:
    run, temporary = tmp_path / "run", tmp_path / "t"
    (run / "logs").mkdir(parents=True)
    temporary.mkdir()
    (run / "logs" / "policy-0.log").write_text("told-later-by-the-run of-the-environment\n")
    environment = os.environ | {"RAY_TMPDIR": str(temporary), "A_TOKEN": "of-the-environment"}
    command = [sys.executable, "-c", RUN, str(run)]
    terminal = tmp_path / "terminal"
    with (
        terminal.open("w") as shown,
        subprocess.Popen(
            command, stdin=-1, stdout=-1, stderr=shown, env=environment, text=True
        ) as process,
    ):
        assert process.stdin and process.stdout
        child = int(process.stdout.readline())
        assert len(list(temporary.iterdir())) == 1
        if killed:
            process.kill()
        process.stdin.close()
        if not killed:
            assert process.stdout.readline() == "ended False\n"
    end = time.monotonic() + GONE_S
    while list(temporary.iterdir()) or (killed and is_alive(child)):
        assert time.monotonic() < end
        time.sleep(0.1)
    if killed:
        assert json.loads((run / "outcome.json").read_text())["state"] == "killed"
    assert (run / "outcome.json").exists() == killed
    assert ("ended without a word" in terminal.read_text()) == killed
    assert (run / "logs" / "policy-0.log").read_text() == "[redacted] [redacted]\n"
