"""Which ranks must be near one another, and the node of each rank. Pure.

Megatron numbers ranks tp, cp, dp, pp from the inside out, and for experts etp, ep, the rest, pp. So
a group of tp, cp, etp or ep lies within a block of consecutive ranks, and a stage is one.
"""

from collections.abc import Sequence
from math import lcm

from rltrain.config.policy import ParallelConfig


def block_sizes(parallel: ParallelConfig) -> tuple[list[int], list[int]]:
    """Sizes of the blocks of ranks to keep on one node, the most that one may wish for first.

    Returns:
        Blocks that hold whole groups of tp, cp, etp and ep: all ranks, a stage, no more than it
        takes; and blocks that cut some of them, of which the innermost exchange most.
    """
    tp, etp = parallel.tp, parallel.etp
    cp, ep = tp * parallel.cp, etp * parallel.ep
    stage = parallel.world_size // parallel.pp
    whole = list(dict.fromkeys((parallel.world_size, stage, lcm(cp, ep))))
    cutting = dict.fromkeys((lcm(cp, etp), lcm(tp, ep), lcm(tp, etp), tp, 1))
    return whole, [size for size in cutting if size not in whole]


def order_ranks(room: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The node of each rank.

    Args:
        room: ranks that each node takes; their sum is ``sizes[0]``
        sizes: of blocks; one that fits on no node whole is cut into the next size
    """
    chain = sizes[:1]
    for size in sizes[1:]:
        if chain[-1] % size == 0:
            chain = [*chain, size]
    rest = list(room)
    nodes: list[int] = []

    def put(size: int, level: int) -> None:
        current = nodes[-1:]
        fitting = [node for node in (*current, *range(len(rest))) if rest[node] >= size]
        if fitting:
            nodes.extend([fitting[0]] * size)
            rest[fitting[0]] -= size
            return
        smaller = chain[level + 1]
        for _ in range(size // smaller):
            put(smaller, level + 1)

    put(chain[0], 0)
    return nodes
