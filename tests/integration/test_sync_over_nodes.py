"""A weight sync over three nodes that are one machine: gloo between them, memory inside each.

Nodes a and b have a pipeline stage each, b two engines and c one. So stage 0 goes by gloo to an
engine of b, whose memory the other one reads, and to c; stage 1 is read on b and goes to c by gloo.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rltrain.actors.failures import ActorFailed
from rltrain.config import Config
from rltrain.config.model import TinyModel
from rltrain.controller.cluster.engines import Engines, engine_spec
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.controller.weight_links import Connection, SyncNodes
from rltrain.controller.weight_sync import WeightSync
from rltrain.data.tiny_model import save_tiny_model
from rltrain.planning.placement import Placement
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec
from rltrain.weights.families import read_architecture
from rltrain.weights.sync.digest import check_same

pytestmark = [pytest.mark.integration, pytest.mark.slow]
LIMIT_S = 300.0
NODES = SyncNodes(policy=("a", "b"), engines=("b", "b", "c"))
TINY = TinyModel(num_layers=4, hidden_size=64, expert_size=64)


@dataclass(frozen=True)
class Started:
    policy: PolicyGroup
    engines: Engines
    specs: list[EngineSpec]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Engines 0 and 1 begin with other weights than the policy, engine 2 with the policy's."""
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        save_tiny_model(TINY.model_copy(update={"seed": seed}), root / f"{seed}")
    config = Config.model_validate(
        {
            "model": {"path": str(root / "0")},
            "policy": {"parallel": {"pp": 2}, "threads": 1},
            "rollout": {"num_engines": 3, "max_response_tokens": 8, "kv_cache_gib": 1},
            "routing_replay": {"mode": "off", "capture": False},
        }
    )
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    placed = Cluster(Placement("cpu"))
    spec = engine_spec(config, root / "0", read_architecture(root / "0", "skip"), placed)
    specs = [replace(spec, model_path=str(root / seed)) for seed in "110"]
    actors, ready = zip(*[start_engine(one) for one in specs], strict=True)
    policy = PolicyGroup(config, str(root / "0"), placed)
    ray.get(list(ready), timeout=LIMIT_S)
    yield Started(policy, Engines(list(actors), LIMIT_S, LIMIT_S), specs)
    ray.shutdown()


def test_every_engine_gets_every_stage_bitwise(started: Started) -> None:
    old, other, fresh = started.engines.digests()
    assert old == other != fresh
    sync = WeightSync(started.policy, started.engines, "broadcast", NODES)
    for _ in range(2):
        metrics = sync.sync("float32")
        for digest in started.engines.digests():
            check_same(digest, fresh)
    tensors = sum(path.stat().st_size for path in model_files(started))
    assert metrics["weights/bytes"] == pytest.approx(tensors, rel=0.05)
    # Stage 0 goes to two nodes and stage 1 to one; the embedding makes them unequal.
    assert 1.2 < metrics["weights/bytes_between_nodes"] / metrics["weights/bytes"] < 1.8


def test_a_new_engine_takes_the_place_of_one_that_died(started: Started) -> None:
    """The one that receives for its node. All leave their groups, of which it was a member."""
    sync = WeightSync(started.policy, started.engines, "broadcast", NODES)
    sync.sync("float32")
    pid = ray.get(started.engines.actors[0].capabilities.remote())["pid"]
    os.kill(pid, signal.SIGKILL)
    started.engines.actors[0], ready = start_engine(started.specs[0])
    ray.get(ready, timeout=LIMIT_S)
    new, *others = started.engines.digests()
    assert new != others[0] == others[1]
    sync.disconnect()
    sync.repeat()
    for digest in started.engines.digests():
        check_same(digest, others[0])


def model_files(started: Started) -> list[Path]:
    config: Any = started.policy._config
    return list(Path(config.model.path).glob("*.safetensors"))


class Interrupted(WeightSync):
    """The engine that receives stage 0 for node b dies before the first bucket is sent."""

    def _load(self, first: Any, connection: Connection) -> list[int]:
        actor = self.engines.actors[0]
        pid = ray.get(actor.capabilities.remote())["pid"]
        for child in psutil.Process(pid).children(recursive=True):
            child.kill()
        return super()._load(first, connection)


def test_an_engine_that_dies_in_a_sync_ends_it(started: Started) -> None:
    """Last, since it takes an engine away."""
    sync = Interrupted(started.policy, started.engines, "broadcast", NODES)
    began = time.monotonic()
    with pytest.raises(ActorFailed, match=r"engine process died\. It was killed"):
        sync.sync("float32")
    assert time.monotonic() - began < 60
