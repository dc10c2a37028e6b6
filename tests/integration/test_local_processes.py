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


@pytest.mark.parametrize(
    ("who", "number", "said"),
    [
        ("gcs_server", signal.SIGKILL, "Ray's gcs_server (process "),
        ("raylet", signal.SIGSTOP, "Ray's raylet (process "),
        ("actor", signal.SIGSTOP, "died"),
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
    gone = [pid for pid in (*pids, raylet) if psutil.pid_exists(pid)]
    assert [p for p in gone if psutil.Process(p).status() != psutil.STATUS_ZOMBIE] == []
    assert not ray.is_initialized()
