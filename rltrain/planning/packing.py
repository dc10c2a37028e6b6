"""How many ranks and engines each node takes. Pure numbers: no addresses, no devices.

There are items of two sizes, blocks of ranks and engines, so that an exact answer is cheap: where
the two quick ways of packing find no place for all, `_exact` decides whether there is one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Fit = Callable[[Sequence[int], Sequence[int]], int]


@dataclass(frozen=True)
class Demand:
    """What has to be placed. Sizes are in the units of what is free."""

    block: int
    """Size of a block of ranks, which no node boundary may cut."""
    policy: int
    """Number of blocks."""
    critic: int
    """Those with places of their own."""
    engine: int
    engines: int
    shared: bool = False
    """Whether engines lie within the policy's blocks."""


@dataclass(frozen=True)
class Counts:
    """By node."""

    policy: list[int]
    """Blocks."""
    critic: list[int]
    engines: list[int]


def pack(free: Sequence[int], demand: Demand) -> Counts | None:
    """Counts by node; None where the demand cannot be met with whole blocks and engines.

    All goes on the first node that has room for it. Else the policy is kept together: on the first
    node that takes all of it, or on those that take most.
    """
    blocks = demand.block * (demand.policy + demand.critic)
    needed = blocks + (0 if demand.shared else demand.engine * demand.engines)
    for node, room in enumerate(free):
        if room >= needed:
            alone = [room if n == node else 0 for n in range(len(free))]
            if counts := _greedy(alone, demand, _first):
                return counts
    for fit in (_first, _tightest):
        if counts := _greedy(free, demand, fit):
            return counts
    return _exact(free, demand)


def _first(rooms: Sequence[int], candidates: Sequence[int]) -> int:
    return candidates[0]


def _tightest(rooms: Sequence[int], candidates: Sequence[int]) -> int:
    return min(candidates, key=lambda node: (rooms[node], node))


def _greedy(free: Sequence[int], demand: Demand, fit: Fit) -> Counts | None:
    rest = list(free)
    policy = _fill(rest, demand.block, demand.policy, fit)
    critic = policy and _fill(rest, demand.block, demand.critic, fit)
    if policy is None or critic is None:
        return None
    if demand.shared:
        rest = [blocks * demand.block for blocks in policy]
    engines = _fill(rest, demand.engine, demand.engines, _tightest)
    return None if engines is None else Counts(policy, critic, engines)


def _fill(rest: list[int], size: int, count: int, fit: Fit) -> list[int] | None:
    """Items by node, on as few nodes as possible; ``rest`` is what they leave."""
    placed = [0] * len(rest)
    while count:
        enough = [node for node, room in enumerate(rest) if room >= size * count]
        roomiest = max(range(len(rest)), key=lambda node: (rest[node] // size, -node), default=None)
        if enough:
            node = fit(rest, enough)
        elif roomiest is not None and rest[roomiest] >= size:
            node = roomiest
        else:
            return None
        taken = min(count, rest[node] // size)
        placed[node] += taken
        rest[node] -= taken * size
        count -= taken
    return placed


def _exact(free: Sequence[int], demand: Demand) -> Counts | None:
    """As `pack`, found whenever there is an answer.

    After each node, ``most[b]`` is how many engines have a place at most where b blocks have one.
    """
    own = 0 if demand.shared else demand.critic
    blocks = demand.policy + own
    if demand.shared and sum(room // demand.block for room in free) < blocks + demand.critic:
        return None
    most = np.full(blocks + 1, -1)
    most[0] = 0
    chosen = []
    for room in free:
        now, choice = np.full_like(most, -1), np.zeros_like(most)
        for taken in range(min(room // demand.block, blocks) + 1):
            used = taken * demand.block
            engines = (used if demand.shared else room - used) // max(1, demand.engine)
            before = most[: blocks + 1 - taken]
            value = np.where(before < 0, -1, before + engines)
            better = value > now[taken:]
            now[taken:][better] = value[better]
            choice[taken:][better] = taken
        chosen.append(choice)
        most = now
    if most[blocks] < demand.engines:
        return None
    left, by_node = blocks, []
    for choice in reversed(chosen):
        by_node.append(int(choice[left]))
        left -= by_node[-1]
    return _split(free, by_node[::-1], demand)


def _split(free: Sequence[int], blocks: list[int], demand: Demand) -> Counts | None:
    """Hand the blocks of policy and critic that the nodes take to one or the other."""
    if demand.shared:
        rest = [room - n * demand.block for room, n in zip(free, blocks, strict=True)]
        critic = _fill(rest, demand.block, demand.critic, _tightest)
        policy, left = blocks, [n * demand.block for n in blocks]
    else:
        places = list(blocks)
        policy_or_none = _fill(places, 1, demand.policy, _first)
        assert policy_or_none is not None, (blocks, demand)
        policy, critic = policy_or_none, places
        left = [room - n * demand.block for room, n in zip(free, blocks, strict=True)]
    engines = _fill(left, demand.engine, demand.engines, _tightest)
    assert critic is not None and engines is not None, (free, blocks, demand)
    return Counts(policy, critic, engines)
