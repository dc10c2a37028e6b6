"""The Ray cluster and what each actor gets of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private import ray_constants

from rltrain.config import Config


@dataclass(frozen=True)
class Cluster:
    """What the actors of a run are placed on. On a CPU they share all cores and take turns."""

    device: Literal["cpu", "cuda"]
    policy_gpus: float  # of each policy rank
    engine_gpus: float  # of each engine

    @property
    def policy_options(self) -> dict[str, Any]:
        # Megatron's collectives run in an order that has to be the same on all ranks.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {"num_cpus": 0, "num_gpus": self.policy_gpus, "runtime_env": {"env_vars": env}}


@contextmanager
def cluster(config: Config) -> Iterator[Cluster]:
    """Start Ray, or join ``cluster.address``; local servers listen on loopback alone."""
    log_level = os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "warning")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = {
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "num_cpus": max(8, len(os.sched_getaffinity(0))),
    }
    if config.cluster.address is None:
        # Without this Ray on Linux turns a loopback address into the host's own.
        ray_constants.ENABLE_RAY_CLUSTER = False
    ray.init(
        # A cluster of our own, even where Ray finds that of another program on this machine.
        address=config.cluster.address or "local",
        log_to_driver=False,
        logging_level=log_level.upper(),
        **({} if config.cluster.address else local),
    )
    try:
        _link_logs(Path(config.trainer.output_dir))
        yield place(config, int(ray.cluster_resources().get("GPU", 0)))
    finally:
        ray.shutdown()


def place(config: Config, num_gpus: int) -> Cluster:
    """Decide what every actor gets of ``num_gpus`` GPUs.

    Raises:
        ValueError: there are not enough, with the arithmetic.
    """
    device = config.cluster.device
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return Cluster("cpu", 0, 0)
    found = min(num_gpus, config.cluster.num_gpus or num_gpus)
    ranks = config.policy.parallel.world_size
    engines = config.engine_ranks
    if found >= ranks + engines:
        return Cluster("cuda", 1, config.rollout.tensor_parallel)
    if found == ranks == engines == 1:
        return Cluster("cuda", 0.5, 0.5)
    raise ValueError(
        f"the run needs {ranks} GPUs for the policy and {engines} for "
        f"{config.rollout.num_engines} engines of {config.rollout.tensor_parallel}: expected "
        f"{ranks + engines}, or one that one rank and one engine share; found {found}. Lower "
        "policy.parallel or rollout.num_engines"
    )


def _link_logs(run_dir: Path) -> None:
    """Actors log to Ray's session folder; the run's folder points there."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())  # type: ignore[attr-defined]
    link = run_dir / "ray-logs"
    link.unlink(missing_ok=True)
    link.symlink_to(session / "logs")
