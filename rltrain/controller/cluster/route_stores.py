"""Where routes are stored, and in how large objects, by where engines and policy ranks are."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.rollout.route_store import RouteStore
from rltrain.routing.codec import route_dtype
from rltrain.routing.objects import OBJECT_BYTES
from rltrain.weights.architecture.decoder import Architecture

logger = logging.getLogger(__name__)


def start_route_stores(placed: Cluster) -> dict[str, Any]:
    """One on each node that has an engine, by the node's address."""
    return {
        node: RouteStore.options(**placed.actor_on(node)).remote()
        for node in dict.fromkeys(placed.engine_nodes)
    }


def object_bytes(policy_nodes: Sequence[str], stages: int) -> int:
    """Up to how many bytes samples may share an object; see `rltrain.routing.objects`.

    Which rank gets a sample is not known when it is stored. While one node has all ranks of a
    stage it needs all samples of the stage's layers, so nothing is fetched in vain. Once the ranks
    of a stage are on several nodes, each would fetch its neighbours' samples too.

    Args:
        policy_nodes: by rank, of which each stage has an equal stretch
    """
    size = max(1, len(policy_nodes) // stages)
    parts = (policy_nodes[start : start + size] for start in range(0, len(policy_nodes), size))
    return OBJECT_BYTES if all(len(set(nodes)) == 1 for nodes in parts) else 0


def warn_of_small_stores(config: Config, arch: Architecture, engine_nodes: Sequence[str]) -> None:
    """Say so where a step's routes may not fit into the object store of an engine's node: Ray then
    moves them to that node's disk, which is slow."""
    room = {
        node["NodeManagerAddress"]: int(node["Resources"].get("object_store_memory", 0))
        for node in ray.nodes()
        if node["Alive"]
    }
    for text in small_stores(most_route_bytes(config, arch), engine_nodes, room):
        logger.warning("%s", text)


def most_route_bytes(config: Config, arch: Architecture) -> int:
    """Of a step whose sequences are all of the largest length."""
    sequences = config.prompts_per_round * config.algorithm.group_size
    tokens = sequences * (config.data.max_prompt_tokens + config.rollout.max_response_tokens)
    width = route_dtype(arch.num_experts).itemsize
    return tokens * len(arch.moe_layers) * arch.experts_per_token * width


def small_stores(
    route_bytes: int, engine_nodes: Sequence[str], room: Mapping[str, int]
) -> list[str]:
    """A text for each node whose part of the routes may be larger than its object store.

    Args:
        engine_nodes: by engine; each engine makes an equal part
        room: bytes of the object store of each node; a node may be missing
    """
    engines = Counter(engine_nodes)
    parts = {node: route_bytes * count // engines.total() for node, count in engines.items()}
    return [
        f"node {node}: the routes of a step may take {part / 1e9:.2f} GB there, and Ray's object "
        f"store has {room[node] / 1e9:.2f} GB. What does not fit goes to the node's disk, which is "
        "slow. Start Ray there with a larger --object-store-memory, or lower "
        "trainer.prompts_per_step"
        for node, part in parts.items()
        if node in room and part > room[node]
    ]
