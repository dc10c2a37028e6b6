"""What of a run or of its own Ray dies or is stopped ends a wait, and nothing stays behind.

Not exercised: engines and ranks, of which tests/integration/test_run.py kills one.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import services

from rltrain.actors import run_processes
from rltrain.actors.failures import ActorFailed, AwaitedCall, get_all
from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import cluster

pytestmark = pytest.mark.integration
NOTICED_S = 30.0
ROOT = Path(__file__).parents[2]


@ray.remote(num_cpus=0)
class Parent:
    """An actor with a child process, as an engine has."""

    def start(self) -> list[int]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return [os.getpid(), child.pid]

    def wait(self) -> None:
        time.sleep(600)


def core(name: str) -> int:
    started = ray._private.worker._global_node.all_processes  # type: ignore[attr-defined]
    return int(started[name][0].process.pid)


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("who", "number", "said"),
    [
        ("gcs_server", signal.SIGKILL, "Ray's gcs_server (process "),
        pytest.param("raylet", signal.SIGSTOP, "Ray's raylet (", marks=pytest.mark.slow),
        pytest.param("actor", signal.SIGSTOP, "died", marks=pytest.mark.slow),
    ],
)
def test_a_lost_process_ends_the_wait_and_all_others(
    who: str, number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_processes, "STOPPED_S", 3.0)
    values: dict[str, Any] = {
        "trainer": {"output_dir": str(tmp_path)},
        "cluster": {"device": "cpu"},
    }
    with pytest.raises(ActorFailed) as lost, cluster(Config.model_validate(values)) as placed:
        actor = Parent.options(**placed.actor_on(placed.driver_node, "policy-0")).remote()
        pids = ray.get(actor.start.remote(), timeout=120)
        raylet = core("raylet")
        os.kill(pids[0] if who == "actor" else core(who), number)
        began = time.monotonic()
        get_all([actor.wait.remote()], AwaitedCall("policy", "wait"), 300)
    assert time.monotonic() - began < NOTICED_S
    assert lost.value.kind == "died" and said in str(lost.value), str(lost.value)
    assert [pid for pid in (*pids, raylet) if is_there(pid)] == []
    assert not ray.is_initialized()


DRIVER = """
import os, psutil, signal, sys, ray
from pathlib import Path
from rltrain.controller.cluster.running_ray import running_ray
from tests.integration.test_local_processes import Parent, core
with running_ray(None, Path(sys.argv[1])):
    actor = Parent.remote()
    pids = ray.get(actor.start.remote())
    agents = [child.pid for child in psutil.Process(core("raylet")).children()]
    os.kill(pids[0], signal.SIGSTOP)
    print(*pids, *agents, core("raylet"), core("gcs_server"), flush=True)
    signal.pause()
"""


def test_nothing_outlives_a_driver_that_was_killed(tmp_path: Path, temporary: Path) -> None:
    """Not a process, and nothing in TMPDIR; the run's folder says how it ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment | {"TMPDIR": str(temporary)}
    )
    assert driver.stdout is not None
    lines = iter(driver.stdout.readline, "")
    pids = next([int(word) for word in line.split()] for line in lines if line[:1].isdigit())
    assert len(pids) >= 5  # an agent at least
    (folder,) = temporary.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.glob("r/session_*/sockets/raylet"))
    driver.kill()
    driver.wait()
    end = time.monotonic() + NOTICED_S
    while (left := [pid for pid in pids if is_there(pid)]) or list(temporary.iterdir()):
        assert time.monotonic() < end, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.2)
    assert json.loads((tmp_path / "outcome.json").read_text())["state"] == "killed"
    assert list(tmp_path.glob("ray-logs/session_*/raylet.err"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "first", "limit_s", "ends"),
    [
        ("RAYLET", "mkdir {mark} 2>/dev/null && sleep 600", 900.0, "started"),
        ("GCS_SERVER", "mkdir {mark} 2>/dev/null && sleep 600", 900.0, "started"),
        ("RAYLET", "sleep 600", 60.0, "failed tried "),
        ("RAYLET", "exit 3", 900.0, "failed tried 3 times"),
    ],
)
def test_a_start_that_is_too_slow_is_tried_again(
    which: str, first: str, limit_s: float, ends: str, tmp_path: Path, temporary: Path
) -> None:
    """A program before Ray's own takes too long, the first time or every time."""
    slow = tmp_path / "slow"
    real = getattr(services, f"{which}_EXECUTABLE")
    slow.write_text(f'#!/bin/sh\n{first.format(mark=tmp_path / "mark")}\nexec {real} "$@"\n')
    slow.chmod(0o755)
    command = [sys.executable, "-c", SLOW, which, str(slow), str(tmp_path), str(limit_s)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    done = subprocess.run(command, stdout=-1, stderr=-1, text=True, env=environment, timeout=900)
    assert done.stdout.startswith(ends) and done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("left: 0\n"), done.stdout
    if ends.startswith("failed"):
        assert "Ray did not start (tried " in done.stdout and "[RL4003]" in done.stdout
        assert f"Logs: {tmp_path}/ray-logs" in done.stdout and done.stdout.count("\n") <= 4


SLOW = """
import sys, psutil, ray
from pathlib import Path
from ray._private import services
from rltrain.controller.cluster.running_ray import running_ray
which, program, folder, limit_s = sys.argv[1:]
setattr(services, f"{which}_EXECUTABLE", program)
try:
    with running_ray(None, Path(folder), float(limit_s)):
        print("started", ray.get(ray.remote(lambda: 7).remote(), timeout=120))
except RuntimeError as error:
    tried = str(error).partition("(")[2].partition(" in ")[0]
    print("failed", tried, error)
print("left:", len(psutil.Process().children(recursive=True)))
"""
