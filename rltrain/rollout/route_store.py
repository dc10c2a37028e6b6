"""The actors that own routes in Ray's object store: one on each node that has an engine.

An object is lost when the process that put it ends, and an engine may be restarted before its
rollouts are trained on. Ray 2.56 has no ``ray.put(..., _owner=)``, so the owner puts the arrays
itself: an engine sends them to the store of its own node in one call, through shared memory, and
gets references. What crosses to another node is what the policy's ranks there fetch.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rltrain.actors.failures import PeerDied
from rltrain.actors.node import node_address
from rltrain.batch import RouteRef
from rltrain.rollout.launch import RouteCapture
from rltrain.routing.codec import RouteIds
from rltrain.routing.integrity import CheckedRoutes
from rltrain.routing.objects import pack_routes

PUT_S = 300.0
"""How long a store may take to take the routes of a call, which are on its node."""


class _RouteStore:
    """Owns the objects that it puts, until no reference to them is left."""

    def put(self, arrays: list[RouteIds]) -> tuple[str, list[Any]]:
        """The address of the node where the objects are, and a reference to each."""
        return node_address(), [ray.put(array) for array in arrays]


RouteStore = ray.remote(num_cpus=0)(_RouteStore)


def store_here() -> dict[str, Any]:
    """A store on this process's node, by its address, for engines of this node alone."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {node_address(): RouteStore.options(scheduling_strategy=here).remote()}


async def store_routes(
    routes: Sequence[CheckedRoutes], capture: RouteCapture, weight_version: int, producer: str
) -> list[RouteRef]:
    """Put the routes of a step on this node and return a reference for each sample.

    Raises:
        PeerDied: the store of this node died or does not answer.
        RuntimeError: this node has no store, or there is no room for the routes; with the node's
            address.
    """
    objects, refs = await asyncio.to_thread(
        pack_routes,
        routes,
        capture.shape,
        capture.blocks,
        weight_version,
        producer,
        capture.object_bytes,
    )
    node, handles = await _put(objects, capture)
    return [replace(ref, node=node, blocks=tuple(handles[n] for n in ref.blocks)) for ref in refs]


async def _put(objects: list[RouteIds], capture: RouteCapture) -> tuple[str, list[Any]]:
    """See `store_routes`."""
    here = node_address()
    if (store := capture.stores.get(here)) is None:
        raise RuntimeError(
            f"expected a route store on node {here}, where this engine runs, found stores on "
            f"{', '.join(capture.stores)}: the engine was started elsewhere than it was placed. "
            "Start the run again"
            " [RL5008]"
        )
    try:
        node, handles = await asyncio.wait_for(store.put.remote(objects), PUT_S)
    except TimeoutError as error:
        raise PeerDied(
            f"the route store of node {here} did not take the routes within {PUT_S:g} s: it or "
            "Ray's object store there is stuck. Look at `ray status` and at the load of that "
            "node. The run goes on from its last checkpoint"
            " [RL5008]"
        ) from error
    except RayActorError as error:
        raise PeerDied(
            f"the route store of node {here} is dead, and with it the routes that it held: "
            f"{str(error).strip().splitlines()[0]} Look for a lack of memory on that node. The "
            "run goes on from its last checkpoint"
            " [RL5008]"
        ) from error
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise RuntimeError(no_room(here, sum(array.nbytes for array in objects))) from error
    return node, handles


def no_room(node: str, wanted: int) -> str:
    """What to do where the object store of ``node`` has no room for ``wanted`` bytes of routes."""
    return (
        f"the object store of node {node} is full, and so is the disk that Ray spills it to: "
        f"expected room for {wanted / 1e6:.1f} MB of routes. Start Ray there with a larger "
        "--object-store-memory (it lies in /dev/shm), free disk space below its --temp-dir, or "
        "lower trainer.prompts_per_step or rollout.max_response_tokens"
        " [RL5009]"
    )
