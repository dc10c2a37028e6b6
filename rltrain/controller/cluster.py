"""The Ray cluster and what each actor gets of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
import ray.util
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rltrain.algorithms.advantages import needs_critic
from rltrain.config import Config
from rltrain.policy.actor import Role

HALF, THIRD = 0.5, 0.33
"""Shares of a GPU, for Ray's counting alone: it limits nobody's memory."""


@dataclass(frozen=True)
class Cluster:
    """What the actors of a run are placed on. On a CPU they share all cores and take turns."""

    device: Literal["cpu", "cuda"]
    policy_gpus: float  # of each policy rank
    engine_gpus: float  # of each engine
    critic_gpus: float = 0  # of each critic rank
    pairs: PlacementGroup | None = None
    """A GPU for each policy rank and the critic rank of that number, where they share. Ray left to
    itself would put two halves of the policy on one GPU, which NCCL refuses."""

    def worker_options(self, role: Role, rank: int) -> dict[str, Any]:
        """Of the Ray actor of one rank."""
        # Megatron's collectives run in an order that has to be the same on all ranks.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false"}
        gpus = self.policy_gpus if role == "policy" else self.critic_gpus
        options = {"num_cpus": 0, "num_gpus": gpus, "runtime_env": {"env_vars": env}}
        if self.pairs is None:
            return options
        pair = PlacementGroupSchedulingStrategy(self.pairs, placement_group_bundle_index=rank)
        return {**options, "scheduling_strategy": pair}


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
        placed = place(config, int(ray.cluster_resources().get("GPU", 0)))
        yield replace(placed, pairs=_reserve_pairs(config, placed))
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
    has_critic = needs_critic(config.algorithm)
    paired = has_critic and config.critic.placement == "shared"
    own = ranks if has_critic and not paired else 0
    if found >= ranks + own + engines:
        policy, critic = (HALF, HALF) if paired else (1, int(has_critic))
        return Cluster("cuda", policy, config.rollout.tensor_parallel, critic)
    if found == ranks == engines == 1 and not own:
        return Cluster("cuda", THIRD, THIRD, THIRD) if paired else Cluster("cuda", HALF, HALF)
    critics = f", {own} for the critic (critic.placement=shared needs none)," if own else ""
    raise ValueError(
        f"the run needs {ranks} GPUs for the policy{critics} and {engines} for "
        f"{config.rollout.num_engines} engines of {config.rollout.tensor_parallel}: expected "
        f"{ranks + own + engines}, or one that one rank and one engine share; found {found}. Lower "
        "policy.parallel or rollout.num_engines"
    )


def _reserve_pairs(config: Config, placed: Cluster) -> PlacementGroup | None:
    """A GPU each for as many pairs of a policy and a critic rank as there are, if they pair up."""
    if placed.critic_gpus != HALF:
        return None
    pairs = ray.util.placement_group([{"GPU": 1}] * config.policy.parallel.world_size)
    ray.get(pairs.ready(), timeout=config.cluster.start_timeout_s)
    return pairs


def _link_logs(run_dir: Path) -> None:
    """Actors log to Ray's session folder; the run's folder points there."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())  # type: ignore[attr-defined]
    link = run_dir / "ray-logs"
    link.unlink(missing_ok=True)
    link.symlink_to(session / "logs")
