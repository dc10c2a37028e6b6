"""A run on two nodes of which one sees other files: environment, preflight, logs, a lost node."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rltrain.actors.failures import ActorFailed, AwaitedCall, get_all
from rltrain.actors.process_start import begin_process
from rltrain.config import Config
from rltrain.controller.cluster.disks import disks_of
from rltrain.controller.cluster.ray_cluster import Cluster, cluster
from tests.integration.two_nodes import NO_TOKEN, OTHER, TwoNodes, two_nodes

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SECRET = "hf_abcdefgh12345678"
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_TOKEN.items():
            patch.setenv(name, value)
        with two_nodes(6417, ROOT) as started:
            yield started


class Actor:
    def __init__(self) -> None:
        begin_process()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def child_environment(self) -> str:
        return subprocess.run(["env"], capture_output=True, text=True, check=True).stdout

    def say(self, text: str) -> int:
        os.write(1, f"{text}\n".encode())
        return os.getpid()

    def fail(self) -> None:
        raise KeyError("who")

    def die(self) -> None:
        os.write(1, b"about to end\n")
        os._exit(3)

    def wait(self) -> None:
        time.sleep(600)


def config(nodes: TwoNodes, name: str, **more: Any) -> Config:
    folder = nodes.private / name
    folder.mkdir()
    settings: dict[str, Any] = {"address": nodes.address, "device": "cpu"}
    return Config.model_validate(
        {"cluster": settings | more, "trainer": {"output_dir": str(folder)}}
    )


def actor_there(placed: Cluster) -> Any:
    """The engine of the run: it has its place on the node that sees other files."""
    assert placed.engine_nodes == (OTHER,)
    return ray.remote(Actor).options(**placed.engine_options(0)).remote()


def call(actor: Any, method: str, *args: Any) -> Any:
    ref = getattr(actor, method).remote(*args)
    return get_all([ref], AwaitedCall("rollout", method), LIMIT_S)[0]


def test_logs_and_variables_reach_the_other_side(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures name the node and have the log; no file of Ray has a secret; nothing is left."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HF_HOME", "/driver/home")
    monkeypatch.setenv("OTHER_TOKEN", "stays")
    before = set(os.listdir("/tmp"))
    env = {"NCCL_DEBUG": "INFO", "MINE": 3, "MY_API_KEY": SECRET[::-1]}
    logged = config(nodes, "logs", env=env)
    with cluster(logged) as placed:
        assert placed.logs is not None
        actor = actor_there(placed)
        variables = call(actor, "environment")
        expected = {
            "NCCL_DEBUG": "INFO",
            "MINE": "3",
            "HF_TOKEN": SECRET,
            "HF_HOME": "/driver/home",
            "MY_API_KEY": SECRET[::-1],
        }
        assert expected.items() <= variables.items() and "OTHER_TOKEN" not in variables
        assert f"HF_TOKEN={SECRET}\n" in call(actor, "child_environment")

        log = placed.logs / "engine-0.log"
        pid = call(actor, "say", "a line")
        wait_until(lambda: log.is_file() and "a line" in log.read_text())
        assert f"=== process {pid} on {OTHER} starts, " in log.read_text()
        with pytest.raises(ActorFailed) as raised:
            call(actor, "fail")
        said = f"rollout.fail: rollout engine 0 on node {OTHER}: KeyError: 'who'\nFull log: {log}"
        assert str(raised.value) == f"{said} [RL4009]"
        with pytest.raises(ActorFailed) as died:
            call(actor, "die")
        assert f"rollout engine 0 on node {OTHER} (process {pid}) died. " in str(died.value)
        assert 'The last line of its log: "about to end"' in str(died.value)
        there = set(disks_of(logged, placed).call(OTHER, os.listdir, "/tmp"))
        (left,) = {name for name in there - before if name.startswith("rltrain-")}
        assert left.endswith(OTHER)
        second = actor_there(placed)
        alive = call(second, "say", "the last line")
    assert log.read_text().endswith("the last line\n") and not psutil.pid_exists(alive)
    assert left not in os.listdir("/tmp")
    found = subprocess.run(
        ["grep", "-rlE", f"{SECRET}|{SECRET[::-1]}", str(nodes.private.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""


def test_a_node_that_differs_is_refused_with_a_table(
    nodes: TwoNodes, caplog: pytest.LogCaptureFixture
) -> None:
    model = nodes.private / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    began = time.monotonic()
    settings = config(nodes, "differs")
    settings = settings.model_copy(
        update={"model": settings.model.model_copy(update={"path": str(model)})}
    )
    nodes.overlay("torch", "2.0.1")
    with pytest.raises(ValueError, match=r"\[RL4021\]") as refused, cluster(settings):
        pass
    assert time.monotonic() - began < 60
    said = str(refused.value)
    assert f"{OTHER}: torch: expected 2." in said and "found 2.0.1" in said
    assert f"{OTHER}: model: config: expected " in said and "found none: put the driver's" in said
    (row,) = [line for line in caplog.text.splitlines() if line.startswith("torch ")]
    assert row.split()[-2:] == ["2.0.1", "REFUSED"] and "\x1b" not in caplog.text
    nodes.overlay("torch", None)


def test_a_node_that_is_silent_for_long_ends_the_run_on_both_sides(nodes: TwoNodes) -> None:
    """As if its cable were cut: all of its processes are stopped, for short and then for long."""
    with cluster(config(nodes, "lost", node_timeout_s=10.0)) as placed:
        actor = actor_there(placed)
        pid = call(actor, "say", "here")
        stop(nodes, 4.0)
        assert call(actor, "say", "still here") == pid
        waiting = actor.wait.remote()
        stopped = stop(nodes, 0)
        began = time.monotonic()
        with pytest.raises(ActorFailed, match=rf"node {OTHER} is lost: .* \[RL4020\]") as lost:
            get_all([waiting], AwaitedCall("rollout", "wait"), LIMIT_S)
        assert time.monotonic() - began < 30 and lost.value.kind == "died"
        wait_until(lambda: time.monotonic() - began > 17)
        go_on(stopped)
        wait_until(lambda: not psutil.pid_exists(pid))


def stop(nodes: TwoNodes, seconds: float) -> list[psutil.Process]:
    """Stop all processes of the other node, and let them go on after so many seconds, if any."""
    stopped = nodes.other_processes()
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    if seconds:
        time.sleep(seconds)
        go_on(stopped)
    return stopped


def go_on(stopped: list[psutil.Process]) -> None:
    for process in stopped:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def wait_until(done: Any, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)
