"""The actor that owns routes in Ray's object store.

An object dies with the process that put it, and an engine may be restarted while its rollouts are
still to be trained on. Ray took ``ray.put(..., _owner=)`` away in 2.56, so the owner does the
putting: arrays go to it in one call, references come back.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from rltrain.batch import RouteRef
from rltrain.routing.codec import Routes, assign_objects, checksum, encode
from rltrain.routing.integrity import RouteShape


class _RouteStore:
    """Owns what is put through it, until nobody refers to it any more."""

    def put(self, arrays: list[Routes]) -> list[Any]:
        return [ray.put(array) for array in arrays]


RouteStore = ray.remote(num_cpus=0)(_RouteStore)


async def store_routes(
    store: ActorHandle[Any],
    routes: Sequence[Routes],
    shape: RouteShape,
    layers_per_block: int,
    weight_version: int,
) -> list[RouteRef]:
    """Put the routes of a step, per sample ``[rows, L, K]``, and return a reference for each."""
    encoded = [encode(array, shape.num_experts) for array in routes]
    num_layers, num_blocks = len(shape.moe_layers), len(shape.moe_layers) // layers_per_block
    row_bytes = layers_per_block * shape.experts_per_token * encoded[0].itemsize if encoded else 0
    places = assign_objects([len(array) for array in encoded], row_bytes)
    objects: list[Routes] = []
    members: list[list[Routes]] = [[] for _ in range(places[-1][0] + 1)] if places else []
    for array, (number, _) in zip(encoded, places, strict=True):
        members[number].append(array)
    spans = [slice(b * layers_per_block, (b + 1) * layers_per_block) for b in range(num_blocks)]
    for parts in members:
        whole = np.concatenate(parts)
        objects.extend(np.ascontiguousarray(whole[:, span]) for span in spans)
    refs = await store.put.remote(objects)
    return [
        RouteRef(
            start_row=start,
            rows=len(array),
            num_layers=num_layers,
            experts_per_token=shape.experts_per_token,
            dtype=str(array.dtype),
            checksums=tuple(checksum(array[:, span]) for span in spans),
            weight_version=weight_version,
            blocks=tuple(refs[number * num_blocks : (number + 1) * num_blocks]),
        )
        for array, (number, start) in zip(encoded, places, strict=True)
    ]
