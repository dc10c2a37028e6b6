"""The nodes of a Ray cluster, as far as a placement has to know them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

LOCAL = "127.0.0.1"
"""The address of the one node of a run that starts its own Ray."""


@dataclass(frozen=True)
class Node:
    """What is free on a node, and what it has."""

    address: str
    """As Ray calls it."""
    gpus: int = 0
    """Free ones."""
    cpus: float = 0.0
    total_gpus: int = 0
    total_cpus: float = 0.0
    holders: tuple[str, ...] = ()
    """Who holds what is not free, as far as it is known."""


@dataclass(frozen=True)
class Slot:
    """Where a rank computes."""

    node: str
    """Its address."""
    gpu: int | None = None
    """Among the GPUs that the run has on that node, from 0; None on CPUs."""


def in_order(nodes: Iterable[Node], driver: str) -> list[Node]:
    """The driver's node, then the others by address: 10.0.0.9 before 10.0.0.10."""
    return sorted(nodes, key=lambda node: (node.address != driver, *_numbered(node.address)))


def _numbered(address: str) -> tuple[int, int, str]:
    try:
        found = ip_address(address)
    except ValueError:  # a host name
        return (9, 0, address)
    return (found.version, int(found), "")


def planned_nodes(gpus: int, per_node: int) -> list[Node]:
    """Nodes of so many GPUs each, all free, for a plan; the last has what is left of ``gpus``."""
    sizes = [min(per_node, gpus - first) for first in range(0, gpus, per_node)]
    return [Node(f"node-{n}", gpus=size, total_gpus=size) for n, size in enumerate(sizes)]
