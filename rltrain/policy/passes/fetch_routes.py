"""Routes out of the object store, into the process that replays them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, ObjectStoreFullError, OutOfDiskError

from rltrain.actors.failures import PeerDied
from rltrain.actors.node import node_address
from rltrain.batch import SampleRoutes
from rltrain.routing.codec import RouteIds
from rltrain.routing.links import FetchedObjects
from rltrain.routing.objects import assemble_routes, blocks_of

LIMIT_S = 600.0
"""How long the objects of a call may take to arrive."""


def fetch_routes(samples: Sequence[SampleRoutes], layers: Sequence[int]) -> RouteIds:
    """As `fetch_and_count`, without the count."""
    return fetch_and_count(samples, layers)[0]


def fetch_and_count(
    samples: Sequence[SampleRoutes], layers: Sequence[int]
) -> tuple[RouteIds, FetchedObjects]:
    """The routes of some sequences, end to end as in a `Batch`, checked; and what of them lay on
    other nodes.

    The last token of a sequence has no route: its row is zeros and False in ``route_mask``. The
    result is this process's own and the only copy it makes: what lies in the object store is read
    where it is, shared with the node's other ranks.

    Args:
        samples: the references of each sequence, one sequence or more of one model's routes
        layers: global numbers of layers that have a router, e.g. those of this pipeline rank, in
            the order wanted. Only the blocks that hold them are fetched, each once.
    Returns:
        uint8 or int16  # [N, len(layers), K]
    Raises:
        ValueError: when an object differs from what its reference says.
        PeerDied: when an object is lost with its node or does not come within `LIMIT_S`.
        RuntimeError: when there is no room for it.
    """
    wanted = [
        [(ref, {block: ref.blocks[block] for block in blocks_of(ref, layers)}) for ref in refs]
        for refs in samples
    ]
    parts = [part for of_sample in wanted for part in of_sample]
    owners = {handle: ref.node for ref, blocks in parts for handle in blocks.values()}
    arrays = _get(owners)
    num_rows = sum(ref.rows for ref, _ in parts) + len(samples)
    first = samples[0][0]
    routes = np.empty((num_rows, len(layers), first.experts_per_token), dtype=first.dtype)
    start = 0
    for of_sample in wanted:
        for ref, blocks in of_sample:
            held = {block: arrays[handle] for block, handle in blocks.items()}
            assemble_routes(ref, held, layers, out=routes[start : start + ref.rows])
            start += ref.rows
        routes[start] = 0
        start += 1
    here = node_address()
    elsewhere = {
        handle.hex(): (node, arrays[handle].nbytes)
        for handle, node in owners.items()
        if node != here
    }
    return routes, FetchedObjects(here, elsewhere)


def _get(owners: Mapping[Any, str]) -> dict[Any, RouteIds]:
    """Each object, by its handle.

    Args:
        owners: the node of each handle's owner
    Raises:
        PeerDied, RuntimeError: naming the node.
    """
    handles = list(owners)
    try:
        return dict(zip(handles, ray.get(handles, timeout=LIMIT_S), strict=True))
    except GetTimeoutError as error:
        raise PeerDied(
            f"expected {len(handles)} objects of routes on node {node_address()} within "
            f"{LIMIT_S:g} s, and not all have come from {', '.join(sorted(set(owners.values())))}: "
            "a route store or the network to it is stuck. Look at `ray status`. The run "
            "goes on from its last checkpoint"
            " [RL5008]"
        ) from error
    except ObjectLostError as error:
        lost = {handle.hex(): node for handle, node in owners.items()}
        node = lost.get(error.object_ref_hex, ", ".join(sorted(set(lost.values()))))
        raise PeerDied(
            f"expected {len(handles)} objects of routes, found that the route store of node {node} "
            f"is gone, and with it the routes that it held ({type(error).__name__}): the node left "
            "the cluster, or the store's process was killed there. Look at `ray status` and at the "
            "memory of that node. The run goes on from its last checkpoint"
            " [RL5008]"
        ) from error
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise RuntimeError(
            f"the object store of node {node_address()} is full, and so is the disk that Ray "
            f"spills it to: expected room for {len(handles)} objects of routes. Start Ray there "
            "with a larger --object-store-memory (it lies in /dev/shm), or free disk space below "
            "its --temp-dir"
            " [RL5009]"
        ) from error
