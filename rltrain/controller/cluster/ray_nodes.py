"""The nodes of the Ray cluster that this process is part of, and what of them is free."""

from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state

from rltrain.controller.cluster.ray_holders import read_holders
from rltrain.planning.nodes import Node, in_order


@dataclass(frozen=True)
class RayNodes:
    """Those that are alive. ``nodes`` and ``ids`` are in the order in which a run uses them."""

    nodes: tuple[Node, ...]
    ids: dict[str, str]
    """Ray's own name of a node, by its address."""
    driver: str
    """The address of the node on which this process runs."""


def read_nodes() -> RayNodes:
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    free = state.available_resources_per_node()
    holders = read_holders()
    here = ray.get_runtime_context().get_node_id()
    found: dict[str, tuple[Node, str]] = {}
    for node_id, node in alive.items():
        read = _node(node, free.get(node_id, {}), holders.get(node_id, ()))
        # Of several raylets at one address the one with most: a run cannot tell them apart.
        if read.address not in found or _room(read) > _room(found[read.address][0]):
            found[read.address] = read, node_id
    driver = alive[here]["NodeManagerAddress"]
    nodes = in_order([node for node, _ in found.values()], driver)
    return RayNodes(tuple(nodes), {a: node_id for a, (_, node_id) in found.items()}, driver)


def _node(node: dict[str, Any], free: dict[str, float], holders: tuple[str, ...]) -> Node:
    has = node["Resources"]
    return Node(
        node["NodeManagerAddress"],
        gpus=int(free.get("GPU", 0)),
        cpus=float(free.get("CPU", 0)),
        total_gpus=int(has.get("GPU", 0)),
        total_cpus=float(has.get("CPU", 0)),
        holders=holders,
    )


def _room(node: Node) -> tuple[int, float]:
    return node.gpus, node.cpus
