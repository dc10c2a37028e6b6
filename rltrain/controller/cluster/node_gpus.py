"""What the GPUs of a run do meanwhile, on every node."""

from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.tracking.gpus import Listen, gpu_source


def gpu_listener(placed: Cluster) -> Listen | None:
    """How to hear of the GPUs on all nodes; None where the run's only node is this machine."""
    if placed.device == "cpu" or not placed.on_nodes.agents:
        return None
    gpus = {node: (placed.gpu_ids_of(node),) for node in placed.nodes}
    return lambda take: placed.on_nodes.listen("gpus", gpu_source, gpus, take)
