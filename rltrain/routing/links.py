"""What the routes of a step cost the links between nodes, counted from what ranks fetched. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Link = tuple[str, str]
"""Addresses of two nodes: from, to."""


@dataclass(frozen=True)
class FetchedObjects:
    """What one rank read from object stores of other nodes than its own."""

    node: str  # where the rank runs
    objects: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By the object's id: the node whose store owns it, and its bytes."""


def bytes_by_link(fetched: Iterable[FetchedObjects]) -> dict[Link, int]:
    """The bytes that came over each link, by (from, to). Ray brings an object to a node once, and
    the node's ranks share it; so it counts once for the node, whichever of them read it."""
    came: dict[tuple[str, str], tuple[str, int]] = {}
    for rank in fetched:
        came |= {(rank.node, name): found for name, found in rank.objects.items()}
    links: dict[Link, int] = {}
    for (to, _), (source, size) in came.items():
        links[source, to] = links.get((source, to), 0) + size
    return dict(sorted(links.items()))
