"""Where Ray puts the actors of a run, and which GPUs they see. Nothing here computes on them."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import ray

from rltrain.actors.actor_log import FOLDER, LOG, redirect_output
from rltrain.actors.failures import ActorFailed, AwaitedCall, get_all
from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import OVERRIDE_ON_ZERO, placed_cluster

pytestmark = pytest.mark.integration
GPUS = ("4", "5", "6", "7")


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    """Ray believes in four GPUs, of which no other program may see more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS))
        # As a cluster may be set up that somebody else started.
        patch.setenv(OVERRIDE_ON_ZERO, "1")
        quiet = {"include_dashboard": False, "log_to_driver": False}
        ray.init(address="local", num_cpus=2, num_gpus=len(GPUS), **quiet)
        yield
        ray.shutdown()


@ray.remote
class Actor:
    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@ray.remote
class Failing:
    def __init__(self, works: bool = True) -> None:
        redirect_output()
        if not works:
            raise KeyError("in its constructor")

    def ready(self) -> None:
        pass

    def do(self, what: str, after_s: float = 0.0) -> None:
        os.write(1, f"about to {what}\n".encode())
        time.sleep(after_s)
        if what == "wait":
            time.sleep(60)
        elif what == "exit":
            os._exit(3)
        elif what == "crash":
            ctypes.string_at(0)
        elif what == "raise":
            raise KeyError("who")
        elif what == "raise what nobody can read":
            raise type("Private", (Exception,), {"__reduce__": None})("that")
        else:
            os.kill(os.getpid(), getattr(signal, what))


def config(placement: str, num_engines: int, timeout_s: float = 60) -> Config:
    values: dict[str, Any] = {
        "algorithm": {"advantage": "gae"},
        "policy": {"parallel": {"dp": 2}},
        "rollout": {"num_engines": num_engines, "tensor_parallel": 2},
        "cluster": {"device": "cuda", "placement": placement, "start_timeout_s": timeout_s},
    }
    return Config.model_validate(values)


def test_every_actor_sees_the_gpus_of_its_ranks_alone(started: None) -> None:
    apart = placed_cluster(config("disaggregated", 1))
    gpus = apart.gpu_ids
    assert gpus == GPUS
    roles: tuple[Literal["policy", "critic"], ...] = ("policy", "critic")
    options = [
        *(apart.worker_options(role, rank) for role in roles for rank in range(2)),
        apart.engine_options(0),
    ]
    actors = [Actor.options(**each).remote() for each in options]
    found = ray.get([actor.gpus.remote() for actor in actors], timeout=120)
    assert found == [gpus[0], gpus[1], gpus[0], gpus[1], f"{gpus[2]},{gpus[3]}"]

    with pytest.raises(RuntimeError, match=r"expected 2 free GPUs on .* within 1 s"):
        placed_cluster(config("colocated", 1, timeout_s=1))
    assert apart.reserved is not None
    ray.util.remove_placement_group(apart.reserved.bundles)
    placed = placed_cluster(config("colocated", 1))
    seen = placed.engine_options(0)["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"]
    assert seen == ",".join(placed.gpu_ids) == "4,5"


@pytest.mark.parametrize(
    ("what", "kind", "texts"),
    [
        ("raise", "raised", ["policy.do: KeyError: 'who'", "Full log: "]),
        ("raise what nobody can read", "raised", ["Private: that"]),
        ("crash", "died", ["policy worker 0 (process ", "Fatal Python error: Segmentation fault"]),
        ("exit", "died", ["left no error", 'its log: "about to exit"']),
        ("SIGKILL", "died", ["was killed", "GiB of memory are in use"]),
        ("SIGTERM", "died", ["ended with SIGTERM"]),
    ],
)
def test_a_failing_actor_is_reported_with_its_own_error(
    what: str,
    kind: str,
    texts: list[str],
    started: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever becomes of it, in one kind of failure, though another rank waits for ever."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    actors = [
        Failing.options(runtime_env={"env_vars": {LOG: f"{tmp_path}/policy-{rank}.log"}}).remote()
        for rank in range(2)
    ]
    began = time.monotonic()
    with pytest.raises(ActorFailed) as failed:
        refs = [actors[0].do.remote(what), actors[1].do.remote("wait")]
        get_all(refs, AwaitedCall("policy", "do"), timeout_s=40)
    assert time.monotonic() - began < 35
    assert failed.value.kind == kind
    said = str(failed.value)
    assert said.startswith("policy.do: ") and [t for t in texts if t not in said] == [], said
    assert "\x1b" not in said and "Worker exit type" not in said
    for actor in actors:
        ray.kill(actor)


def test_another_actors_death_ends_a_wait_and_a_silent_one_is_named(
    started: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    waiting, dying = (
        Failing.options(runtime_env={"env_vars": {LOG: f"{tmp_path}/{name}-0.log"}}).remote()
        for name in ("policy", "engine")
    )
    get_all(
        [waiting.ready.remote(), dying.ready.remote()], AwaitedCall("policy", "ready"), timeout_s=60
    )
    with pytest.raises(ActorFailed, match="1 did not answer") as failed:
        get_all([waiting.do.remote("wait")], AwaitedCall("policy", "do"), timeout_s=1)
    assert failed.value.kind == "silent"
    assert "policy-0.log: about to wait" in str(failed.value)
    dying.do.remote("SIGKILL", after_s=2)
    with pytest.raises(ActorFailed, match=r"policy\.do: rollout engine 0 .* was killed") as failed:
        get_all([waiting.do.remote("wait")], AwaitedCall("policy", "do"), timeout_s=30)
    with pytest.raises(ActorFailed, match="could not be created: KeyError: 'in its constructor'"):
        get_all(
            [Failing.remote(False).do.remote("wait")], AwaitedCall("policy", "do"), timeout_s=30
        )
    ray.kill(waiting)
