"""Keep what a placement takes of each node for this run, and learn which GPUs that is."""

import logging
import time
from dataclasses import dataclass

import ray
import ray.util
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rltrain.config import Config
from rltrain.controller.cluster.ray_nodes import RayNodes, read_nodes
from rltrain.planning.nodes import Node
from rltrain.planning.place_faults import node_table
from rltrain.planning.placement import Placement
from rltrain.tracking.gpus import gpu_name

logger = logging.getLogger(__name__)

NODE_ID = "ray.io/node-id"
"""The label by which Ray pins a bundle to a node."""
POLL_S = 1.0


@dataclass(frozen=True)
class Reservation:
    """One bundle for each node of a placement, in the order of ``placement.nodes``."""

    bundles: PlacementGroup
    gpu_ids: dict[str, tuple[str, ...]]
    """By node, what ``CUDA_VISIBLE_DEVICES`` calls the run's GPUs there."""
    gpu_names: dict[str, str]
    """By node, the model of the first of them; empty where its driver does not say."""


def reserve(config: Config, placement: Placement, found: RayNodes, timeout_s: float) -> Reservation:
    """Keep the GPUs or CPUs of a placement, one bundle a node.

    Raises:
        RuntimeError: others took them, for longer than ``timeout_s``, or a node is gone.
    """
    bundles = ray.util.placement_group(
        [_bundle(config, placement, node) for node in placement.nodes],
        strategy="PACK",
        bundle_label_selector=[{NODE_ID: found.ids[node]} for node in placement.nodes],
    )
    probes = [
        _gpus_here.options(
            num_gpus=placement.gpus_on(node), scheduling_strategy=in_bundle(bundles, number)
        ).remote()
        for number, node in enumerate(placement.nodes)
    ]
    try:
        answers = _answers(bundles, probes, placement, found, timeout_s)
    except BaseException:
        ray.util.remove_placement_group(bundles)
        raise
    answered = dict(zip(placement.nodes, answers, strict=True))
    names = {node: name for node, (_, name) in answered.items()}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{name or 'unknown'} on {node}" for node, name in names.items())
        logger.warning("the nodes have different GPUs, and the slowest set the pace: %s", listed)
    return Reservation(bundles, {node: ids for node, (ids, _) in answered.items()}, names)


def in_bundle(bundles: PlacementGroup, number: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=number)


def _bundle(config: Config, placement: Placement, node: str) -> dict[str, float]:
    if placement.device == "cuda":
        return {"GPU": placement.gpus_on(node)}
    own = (placement.policy, placement.critic if config.critic.placement == "own" else ())
    ranks = sum(slot.node == node for slots in own for slot in slots)
    engines = sum(slots[0].node == node for slots in placement.engines)
    cluster = config.cluster
    return {"CPU": ranks * cluster.cpus_per_rank + engines * cluster.cpus_per_engine}


def _answers(
    bundles: PlacementGroup,
    probes: list[ray.ObjectRef],
    placement: Placement,
    found: RayNodes,
    timeout_s: float,
) -> list[tuple[tuple[str, ...], str]]:
    """What the probes say. Ray itself waits without a word for a node that is gone."""
    last = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(probes, timeout=max(0.0, min(POLL_S, last - time.monotonic())))
        except GetTimeoutError:
            now = read_nodes()
            if gone := [n for n in placement.nodes if now.ids.get(n) != found.ids[n]]:
                raise RuntimeError(
                    f"expected the nodes {', '.join(placement.nodes)} of the Ray cluster, and "
                    f"{', '.join(gone)} left it while the run reserved its place: start Ray there "
                    "again (ray start --address=...), or run without it"
                    f"{node_table(now.nodes)} [RL4001]"
                ) from None
            if time.monotonic() > last:
                kept = ray.util.placement_group_table(bundles)["state"] == "CREATED"
                say = _silent if kept else _taken
                raise RuntimeError(say(placement, now.nodes, timeout_s)) from None


def _taken(placement: Placement, nodes: tuple[Node, ...], timeout_s: float) -> str:
    what = f"{placement.num_gpus} free GPUs" if placement.device == "cuda" else "free CPUs"
    return (
        f"expected {what} on {', '.join(placement.nodes)} within {timeout_s:g} s. Others "
        "hold them: see `ray status`, or raise cluster.start_timeout_s"
        f"{node_table(nodes)} [RL4001]"
    )


def _silent(placement: Placement, nodes: tuple[Node, ...], timeout_s: float) -> str:
    return (
        f"expected a process on each of {', '.join(placement.nodes)} within {timeout_s:g} s. Ray "
        "has reserved the place there and started none: the nodes are slow or busy. See the logs "
        f"of their raylets, or raise cluster.start_timeout_s{node_table(nodes)} [RL4001]"
    )


@ray.remote(num_cpus=0)
def _gpus_here() -> tuple[tuple[str, ...], str]:
    """Their names for CUDA, sorted, so that a rank has the same GPU in every run; and the model."""
    ids = sorted(map(str, ray.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu))
    return tuple(ids), gpu_name(ids)
