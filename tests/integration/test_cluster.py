"""Where Ray puts the actors of a run, and which GPUs they see. Nothing here computes on them."""

import os
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import ray

from rltrain.config import Config
from rltrain.controller.cluster import OVERRIDE_ON_ZERO, reserve
from rltrain.controller.placement import place

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


def config(placement: str, num_engines: int) -> Config:
    values: dict[str, Any] = {
        "algorithm": {"advantage": "gae"},
        "policy": {"parallel": {"dp": 2}},
        "rollout": {"num_engines": num_engines, "tensor_parallel": 2},
        "cluster": {"device": "cuda", "placement": placement},
    }
    return Config.model_validate(values)


def test_every_actor_sees_the_gpus_of_its_ranks_alone(started: None) -> None:
    apart = reserve(place(config("disaggregated", 1), 4), 60)
    gpus = apart.gpu_ids
    assert sorted(gpus) == list(GPUS)
    roles: tuple[Literal["policy", "critic"], ...] = ("policy", "critic")
    options = [
        *(apart.worker_options(role, rank) for role in roles for rank in range(2)),
        apart.engine_options(0),
    ]
    actors = [Actor.options(**each).remote() for each in options]
    found = ray.get([actor.gpus.remote() for actor in actors], timeout=120)
    assert found == [gpus[0], gpus[1], gpus[0], gpus[1], f"{gpus[2]},{gpus[3]}"]

    shared = place(config("colocated", 1), 4)
    with pytest.raises(RuntimeError, match="expected 2 free GPUs on one node within 1 s"):
        reserve(shared, 1)
    assert apart.bundles is not None
    ray.util.remove_placement_group(apart.bundles)
    placed = reserve(shared, 60)
    seen = placed.engine_options(0)["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"]
    assert seen == ",".join(placed.gpu_ids)
