"""Routes between three raylets, each with an address of its own: where they lie, what moves, and
what is said when a node or its room is gone.

The driver is on node 0, an engine and a policy rank on node 1, two more ranks on node 2.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import ray

from benchmarks.route_links import Rank, Raylets
from benchmarks.route_memory import Engine, Size
from rltrain.batch import RouteRef
from rltrain.rollout.route_store import RouteStore
from rltrain.routing.links import bytes_by_link

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SIZE = Size(tokens=512, layers=8, pp=2, dp=1)
HEADER = 512  # Ray's, of an object
STORE_BYTES = 80 << 20  # of each node: Ray's least is 75 MiB
FIRST, LAST = tuple(range(4)), tuple(range(4, 8))


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    # What does not fit would go to the disk, which is as good as full.
    with Raylets.start(3, STORE_BYTES, local_fs_capacity_threshold=0.001) as raylets:
        yield raylets


class Run:
    """An engine on node 1 with its store, and ranks on nodes 1, 2 and 2."""

    def __init__(self, raylets: Raylets, object_bytes: int = 0) -> None:
        self.store = raylets.on(1, RouteStore).remote()
        stores = {raylets.address(1): self.store}
        self.engine = raylets.on(1, ray.remote(Engine)).remote(SIZE, stores, object_bytes)
        self.ranks = [raylets.on(node, ray.remote(Rank)).remote() for node in (1, 2, 2)]

    def generate(self, lens: Sequence[int]) -> list[RouteRef]:
        tokens = [np.arange(n) for n in lens]
        refs: list[RouteRef] = ray.get(self.engine.generate.remote(tokens))[0]
        return refs


def test_routes_lie_on_the_engines_node_and_come_to_another_once(raylets: Raylets) -> None:
    run = Run(raylets)
    run.generate([2])  # connections and code, once
    before = raylets.made()
    refs = run.generate([300, 400, 512, 200])
    stored = raylets.made()
    rows = 299 + 399 + 511 + 199
    assert {ref.node for ref in refs} == {raylets.address(1)}
    # Once as the store put them, and once more where the engine's call is too large for a message.
    assert rows * 8 * 8 <= stored[1] - before[1] <= rows * 8 * 8 * 2 + 20 * HEADER
    assert (stored[0], stored[2]) == (before[0], before[2])
    near, far, other = run.ranks
    layers = [LAST, FIRST, FIRST]
    wanted = [refs, refs[:2], refs[1:2]]
    calls = zip((near, far, other), wanted, layers, strict=True)
    fetched = ray.get([rank.fetch.remote(*what) for rank, *what in calls])
    moved = [now - then for now, then in zip(raylets.made(), stored, strict=True)]
    link = raylets.address(1), raylets.address(2)
    counted = bytes_by_link(came for came, _ in fetched)
    assert counted == {link: (299 + 399) * 4 * 8}, "two sequences, one stage's layers, once"
    assert counted[link] <= moved[2] <= counted[link] + 2 * HEADER
    assert moved[:2] == [0, 0]


def test_routes_outlive_their_engine_and_not_their_store(raylets: Raylets) -> None:
    run = Run(raylets)
    refs = run.generate([300, 400])
    ray.kill(run.engine)
    ray.get(run.ranks[1].fetch.remote(refs, FIRST))
    ray.kill(run.store)
    lost = rf"the route store of node {raylets.address(1)} is gone.*RL5008"
    with pytest.raises(RuntimeError, match=lost):
        ray.get(run.ranks[2].fetch.remote(refs, LAST), timeout=60)


def test_an_engine_whose_store_died_names_the_node(raylets: Raylets) -> None:
    run = Run(raylets)
    run.generate([2])
    ray.kill(run.store)
    wait_until_dead(run.store)
    with pytest.raises(RuntimeError, match=rf"store of node {raylets.address(1)} is dead.*RL5008"):
        run.generate([300])


def test_an_engine_elsewhere_than_its_stores_names_both_nodes(raylets: Raylets) -> None:
    stores = {raylets.address(1): raylets.on(1, RouteStore).remote()}
    engine = raylets.on(2, ray.remote(Engine)).remote(SIZE, stores)
    both = rf"on node {raylets.address(2)}.*found stores on {raylets.address(1)}: .*RL5008"
    with pytest.raises(RuntimeError, match=both):
        ray.get(engine.generate.remote([np.arange(9)]))


def test_a_full_store_is_an_error_that_names_the_node(raylets: Raylets) -> None:
    run = Run(raylets)
    kept = []
    full = rf"object store of node {raylets.address(1)} is full.*RL5009"
    with pytest.raises(RuntimeError, match=full):
        for _ in range(8):  # 16 MB and more each
            kept.append(run.generate([32_768] * 8))
    assert kept, "some had room"


def test_a_lost_node_is_named_in_less_than_a_minute(raylets: Raylets) -> None:
    run = Run(raylets)
    refs = run.generate([300, 400])
    raylets.kill(1)
    began = time.monotonic()
    lost = rf"the route store of node {raylets.address(1)} is gone.*RL5008"
    with pytest.raises(RuntimeError, match=lost):
        ray.get(run.ranks[1].fetch.remote(refs, FIRST), timeout=60)
    assert time.monotonic() - began < 60


def wait_until_dead(actor: Any) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            ray.get(actor.put.remote([]), timeout=5)
        except ray.exceptions.RayActorError:
            return
    raise TimeoutError("the actor still answers")
