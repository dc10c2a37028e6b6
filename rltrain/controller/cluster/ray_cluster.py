"""The Ray cluster and what each actor gets of it."""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
import ray.util
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rltrain.actors.actor_log import FOLDER, LOG
from rltrain.config import Config
from rltrain.controller.cluster.ray_start import HostState, check_address, start_failure
from rltrain.planning.placement import Placement, place
from rltrain.policy.actor import Role

logger = logging.getLogger(__name__)

OVERRIDE_ON_ZERO = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""At 1, the default of old versions, Ray shows no GPU at all to an actor it counts none for."""


@dataclass(frozen=True)
class Cluster:
    """What the actors of a run are started on."""

    placement: Placement
    bundles: PlacementGroup | None = None
    """One for each GPU, all on one node."""
    gpu_ids: tuple[str, ...] = ()
    """What ``CUDA_VISIBLE_DEVICES`` calls the GPU of each bundle."""
    logs: Path | None = None
    """The folder of the actors' logs (`rltrain.actors.actor_log`); None: Ray's own."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return self.placement.device

    def worker_options(self, role: Role, rank: int) -> dict[str, Any]:
        """Of the Ray actor of one rank."""
        # Megatron's collectives run in an order that has to be the same on all ranks.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false"}
        gpus = {"policy": self.placement.policy, "critic": self.placement.critic}[role]
        return self._options(gpus[rank : rank + 1], env, f"{role}-{rank}")

    def engine_options(self, engine: int, log: str = "engine") -> dict[str, Any]:
        """Of the Ray actor of one engine.

        Args:
            log: what its log is called, before the engine's number
        """
        gpus = self.placement.engines[engine] if self.bundles else ()
        return self._options(gpus, {}, f"{log}-{engine}")

    def _options(self, gpus: Sequence[int], env: dict[str, str], log: str) -> dict[str, Any]:
        """Of an actor that sees these GPUs alone. Ray counts none for it, since others may see the
        same ones, and so leaves ``CUDA_VISIBLE_DEVICES`` as it is set here."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        if self.logs is not None:
            env = {**env, LOG: str(self.logs / f"{log}.log")}
        if self.bundles is not None:
            options["scheduling_strategy"] = _in_bundle(self.bundles, gpus[0])
            seen = ",".join(self.gpu_ids[gpu] for gpu in gpus)
            env = {**env, "CUDA_VISIBLE_DEVICES": seen, OVERRIDE_ON_ZERO: "0"}
        return {**options, "runtime_env": {"env_vars": env}}


@contextmanager
def cluster(config: Config) -> Iterator[Cluster]:
    """Start Ray or join it, as `running_ray` does, and give every rank its place.

    Raises:
        RuntimeError: it did not start or cannot be joined, with what to do.
    """
    with running_ray(config.cluster.address):
        run_dir = Path(config.trainer.output_dir)
        _link_logs(run_dir)
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        os.environ[FOLDER] = str(logs)
        try:
            placement = place(config, _gpus_of_a_node())
            logger.info("placement: %s", placement)
            yield replace(reserve(placement, config.cluster.start_timeout_s), logs=logs)
        finally:
            os.environ.pop(FOLDER, None)


@contextmanager
def running_ray(address: str | None) -> Iterator[None]:
    """Start Ray, or join ``address``; local servers listen on loopback alone.

    Raises:
        RuntimeError: it did not start or cannot be joined, with what to do.
    """
    log_level = os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "warning")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(OVERRIDE_ON_ZERO, "0")
    local = {
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "num_cpus": max(8, len(os.sched_getaffinity(0))),
    }
    if address is None:
        # Without this Ray on Linux turns a loopback address into the host's own.
        ray_constants.ENABLE_RAY_CLUSTER = False
    else:
        check_address(address)
    # Its words about a dead actor would come beside ours, which have the actor's own error.
    ray._private.worker._worker_logs_enabled = False
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            # A cluster of our own, even where Ray finds that of another program on this machine.
            address=address or "local",
            log_to_driver=False,
            logging_level=log_level.upper(),
            **({} if address else local),
        )
    except Exception as error:  # Ray raises that class itself
        ray.shutdown()  # what it did start
        raise start_failure(error, address, HostState.now()) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminated)  # Ray's would end the process with status 15
    try:
        yield
    finally:
        ray.shutdown()


def reserve(placement: Placement, timeout_s: float) -> Cluster:
    """Keep the GPUs of a placement for this run, and learn which they are.

    Raises:
        RuntimeError: others hold them for longer than ``timeout_s``.
    """
    if placement.device == "cpu":
        return Cluster(placement)
    bundles = ray.util.placement_group([{"GPU": 1}] * placement.num_gpus, strategy="STRICT_PACK")
    probes = [
        _gpu_id.options(scheduling_strategy=_in_bundle(bundles, gpu)).remote()
        for gpu in range(placement.num_gpus)
    ]
    try:
        return Cluster(placement, bundles, tuple(ray.get(probes, timeout=timeout_s)))
    except GetTimeoutError as error:
        raise RuntimeError(
            f"expected {placement.num_gpus} free GPUs on one node within {timeout_s:g} s. Others "
            "hold them: see `ray status`, or raise cluster.start_timeout_s"
            " [RL4001]"
        ) from error


def _in_bundle(bundles: PlacementGroup, gpu: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=gpu)


@ray.remote(num_cpus=0, num_gpus=1)
def _gpu_id() -> str:
    return str(ray.get_gpu_ids()[0])


def _gpus_of_a_node() -> int:
    """On the node that has most: a run does not span nodes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return max(int(resources.get("GPU", 0)) for resources in nodes)


def _link_logs(run_dir: Path) -> None:
    """Actors log to Ray's session folder; the run's folder points there."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())  # type: ignore[attr-defined]
    link = run_dir / "ray-logs"
    link.unlink(missing_ok=True)
    link.symlink_to(session / "logs")
