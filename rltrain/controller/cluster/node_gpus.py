"""The GPUs of a run on every node: their name, and what they do meanwhile."""

from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.tracking.gpus import Listen, gpu_name, gpu_source

LIMIT_S = 60.0
"""For a node's driver to say what it has."""


def card_name(placed: Cluster) -> str:
    """Of the GPUs that the policy computes on; empty where there are none."""
    if placed.device == "cpu":
        return ""
    node = placed.policy_nodes[0]
    return placed.on_nodes.call(node, gpu_name, placed.gpu_ids_of(node), timeout_s=LIMIT_S)


def gpu_listener(placed: Cluster) -> Listen | None:
    """How to hear of the GPUs on all nodes; None where the run's only node is this machine."""
    if placed.device == "cpu" or not placed.on_nodes.agents:
        return None
    gpus = {node: (placed.gpu_ids_of(node),) for node in placed.nodes}
    return lambda take: placed.on_nodes.listen("gpus", gpu_source, gpus, take)
