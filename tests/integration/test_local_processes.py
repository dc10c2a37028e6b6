"""What of a run or of its own Ray dies or is stopped ends a wait, and nothing stays behind.

Not exercised: engines and ranks, of which tests/integration/test_run.py kills one.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rltrain.actors import run_processes
from rltrain.actors.failures import ActorFailed, AwaitedCall, get_all
from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import cluster

pytestmark = pytest.mark.integration
NOTICED_S = 30.0


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
import os, psutil, signal, ray
from rltrain.controller.cluster.running_ray import running_ray
from tests.integration.test_local_processes import Parent, core
with running_ray(None):
    actor = Parent.remote()
    pids = ray.get(actor.start.remote())
    agents = [child.pid for child in psutil.Process(core("raylet")).children()]
    os.kill(pids[0], signal.SIGSTOP)
    print(*pids, *agents, core("raylet"), core("gcs_server"), flush=True)
    signal.pause()
"""


def test_nothing_outlives_a_driver_that_was_killed() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", DRIVER]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    lines = iter(driver.stdout.readline, "")
    pids = next([int(word) for word in line.split()] for line in lines if line[:1].isdigit())
    assert len(pids) >= 5  # an agent at least
    driver.kill()
    driver.wait()
    end = time.monotonic() + NOTICED_S
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < end, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.2)
