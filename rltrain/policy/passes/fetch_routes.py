"""Routes out of the object store, into the process that replays them."""

from collections.abc import Sequence

import numpy as np
import ray

from rltrain.batch import RouteRef
from rltrain.routing.codec import RouteIds
from rltrain.routing.objects import assemble_routes, blocks_of


def fetch_routes(refs: Sequence[RouteRef], layers: Sequence[int]) -> RouteIds:
    """The routes of some sequences, end to end as in a `Batch`, checked.

    The last token of a sequence has no route: its row is zeros and False in ``route_mask``. The
    result is this process's own and the only copy it makes: what lies in the object store is read
    where it is, shared with the node's other ranks.

    Args:
        refs: one or more, of one model's routes
        layers: global numbers of layers that have a router, e.g. those of this pipeline rank, in
            the order wanted. Only the blocks that hold them are fetched, each once.
    Returns:
        uint8 or int16  # [N, len(layers), K]
    Raises:
        ValueError: when an object differs from what its reference says.
    """
    wanted = [{block: ref.blocks[block] for block in blocks_of(ref, layers)} for ref in refs]
    unique = list(dict.fromkeys(handle for blocks in wanted for handle in blocks.values()))
    arrays = dict(zip(unique, ray.get(unique), strict=True))
    num_rows = sum(ref.rows + 1 for ref in refs)
    routes = np.empty((num_rows, len(layers), refs[0].experts_per_token), dtype=refs[0].dtype)
    start = 0
    for ref, blocks in zip(refs, wanted, strict=True):
        last = start + ref.rows
        held = {block: arrays[handle] for block, handle in blocks.items()}
        assemble_routes(ref, held, layers, out=routes[start:last])
        routes[last] = 0
        start = last + 1
    return routes
