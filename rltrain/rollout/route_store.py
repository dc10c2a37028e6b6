"""The actor that owns routes in Ray's object store.

An object is lost when the process that put it ends, and an engine may be restarted before its
rollouts are trained on. Ray 2.56 has no ``ray.put(..., _owner=)``, so the owner puts the arrays
itself: they are sent to it in one call, and it returns references.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from rltrain.batch import RouteRef
from rltrain.rollout.launch import RouteCapture
from rltrain.routing.codec import RouteIds
from rltrain.routing.integrity import CheckedRoutes
from rltrain.routing.objects import pack_routes


class _RouteStore:
    """Owns the objects that it puts, until no reference to them is left."""

    def put(self, arrays: list[RouteIds]) -> list[Any]:
        return [ray.put(array) for array in arrays]


RouteStore = ray.remote(num_cpus=0)(_RouteStore)


async def store_routes(
    routes: Sequence[CheckedRoutes], capture: RouteCapture, weight_version: int, producer: str
) -> list[RouteRef]:
    """Put the routes of a step and return a reference for each sample."""
    objects, refs = await asyncio.to_thread(
        pack_routes, routes, capture.shape, capture.blocks, weight_version, producer
    )
    handles = await capture.store.put.remote(objects)
    return [replace(ref, blocks=tuple(handles[n] for n in ref.blocks)) for ref in refs]
