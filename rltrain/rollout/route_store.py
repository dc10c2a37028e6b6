"""The actor that owns routes in Ray's object store.

An object dies with the process that put it, and an engine may be restarted while its rollouts are
still to be trained on. Ray took ``ray.put(..., _owner=)`` away in 2.56, so the owner does the
putting: arrays go to it in one call, references come back.
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
    """Owns what is put through it, until nobody refers to it any more."""

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
