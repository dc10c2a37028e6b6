"""Routes out of the object store, into the process that replays them."""

from collections.abc import Sequence

import ray

from rltrain.batch import RouteRef
from rltrain.routing.codec import RouteIds
from rltrain.routing.objects import assemble, blocks_of


def fetch_routes(refs: Sequence[RouteRef], layers: Sequence[int]) -> list[RouteIds]:
    """Per sample ``[rows, len(layers), K]``, uint8 or int16, checked and writable.

    Args:
        layers: global numbers of layers that have a router, e.g. those of this pipeline rank, in
            the order wanted. Only the blocks that hold them are fetched, each once.
    Raises:
        ValueError: when an object differs from what its reference says.
    """
    wanted = [{block: ref.blocks[block] for block in blocks_of(ref, layers)} for ref in refs]
    unique = list(dict.fromkeys(handle for blocks in wanted for handle in blocks.values()))
    arrays = dict(zip(unique, ray.get(unique), strict=True))
    return [
        assemble(ref, {block: arrays[handle] for block, handle in blocks.items()}, layers)
        for ref, blocks in zip(refs, wanted, strict=True)
    ]
