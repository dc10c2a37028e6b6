"""What of this machine a run may use, and whether all its ranks have a place there."""

import os
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from rltrain.config import Config
from rltrain.config.trainer import ClusterConfig
from rltrain.planning.nodes import Node

GPUS_OF_A_NODE = 8
RANKS_PER_CORE = 4
"""At small sizes ranks wait for one another more than they compute. With more, they only wait."""


@dataclass(frozen=True)
class GpuMachine:
    """What a run is planned for: GPUs of one or more nodes."""

    nodes: tuple[Node, ...] | None
    """None: as many as the run needs."""
    memory: int
    """Bytes of each GPU."""
    per_node: int = GPUS_OF_A_NODE
    """Where ``nodes`` is None."""

    @property
    def gpus(self) -> int | None:
        return None if self.nodes is None else sum(node.gpus for node in self.nodes)


def device(cluster: ClusterConfig) -> Literal["cpu", "cuda"]:
    """Where the run computes: ``auto`` is cuda when a GPU is visible and torch can use one."""
    if cluster.device == "auto":
        return "cuda" if count_gpus() and "+cpu" not in metadata.version("torch") else "cpu"
    return cluster.device


def count_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def count_gpus() -> int:
    """GPUs this process may use, read from the driver's device files."""
    present = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    return min(len(present), len([name for name in visible.split(",") if name.strip()]))


def check_ranks(config: Config, device: Literal["cpu", "cuda"], cores: int, gpus: int) -> None:
    """Raise ValueError unless every rank has a place and weights a transport between them.

    On a CPU at most ``RANKS_PER_CORE`` ranks a core, all together.
    """
    # Loads torch, which takes seconds: not before a command needs it.
    from rltrain.planning.place import on_one_cpu, place_locally
    from rltrain.planning.rank_count import arithmetic, count_ranks
    from rltrain.planning.weight_transport import check_transfer

    ranks = count_ranks(config)
    if device == "cpu" and ranks > RANKS_PER_CORE * cores:
        raise ValueError(
            f"expected at most {RANKS_PER_CORE} ranks a core, {RANKS_PER_CORE * cores} on {cores} "
            f"cores, found {ranks}: {arithmetic(config)}. Lower policy.parallel.* or "
            "rollout.num_engines"
            " [RL4002]"
        )
    if device == "cpu":
        check_transfer(config, on_one_cpu(config))
        return
    usable = gpus if config.cluster.num_gpus is None else config.cluster.num_gpus
    if usable > gpus or gpus == 0:
        raise ValueError(
            f"cluster.device=cuda: expected {max(usable, 1)} GPUs, found {gpus} visible ones: "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or set cluster.device=cpu"
            " [RL4001]"
        )
    check_transfer(config, place_locally(config, usable))
