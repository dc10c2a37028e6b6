"""Start a route store on each node that has an engine."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.rollout.route_store import RouteStore


def start_route_stores(placed: Cluster) -> dict[str, Any]:
    """One on each node, by the node's address."""
    return {
        node["NodeManagerAddress"]: RouteStore.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    }
