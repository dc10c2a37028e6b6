"""Where routes are stored, and in how large objects, by where engines and policy ranks are."""

from collections.abc import Sequence
from typing import Any

from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.rollout.route_store import RouteStore
from rltrain.routing.objects import OBJECT_BYTES


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
