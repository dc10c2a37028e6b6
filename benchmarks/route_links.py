"""What routes cost the links between nodes, by where they are stored and in how large objects.

    python -m benchmarks.route_links [--out FILE] [--samples 128] [--tokens 512] [--layers 48]
        [--experts 128] [--k 8] [--pp 1] [--dp 2]

Five raylets on this machine, each with an address of its own: the driver on A, an engine on each of
B and C, the policy's ranks on D and E. With pp=1 the data-parallel ranks of the one stage are on
both; with pp=2 each has one stage. Routes are synthetic; the code that moves them is the trainer's.
Three ways of storing them:

- one: one store, on the driver's node, and samples share objects up to 1 MiB;
- each: a store on each engine's node, and samples share objects up to 1 MiB;
- rule: a store on each engine's node, and objects as `object_bytes` says (what a run does).

``moved`` is what Ray's raylets count: bytes that object stores got from other nodes, routes and
a header an object. ``counted`` is the metric routing/bytes_between_nodes, which is of what ranks
fetch. ``minimum`` is what the ranks of a node need of other nodes' routes: their sequences, their
layers, nothing else.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import ray
from ray._private import internal_api, ray_constants
from ray.cluster_utils import Cluster

from benchmarks.result import Result
from benchmarks.route_memory import Engine, Size
from rltrain.batch import SampleRoutes
from rltrain.controller.cluster.route_stores import object_bytes
from rltrain.data.packing import plan_step
from rltrain.parallel.layer_map import route_layers
from rltrain.policy.passes.fetch_routes import fetch_and_count
from rltrain.rollout.route_store import RouteStore
from rltrain.routing.links import FetchedObjects, bytes_by_link
from rltrain.routing.objects import OBJECT_BYTES

Way = Literal["one", "each", "rule"]


class Rank:
    """A policy rank, as far as it fetches routes."""

    def fetch(
        self, refs: Sequence[SampleRoutes], layers: Sequence[int]
    ) -> tuple[FetchedObjects, float]:
        """What came from elsewhere, and the seconds it took."""
        start = time.perf_counter()
        _, came = fetch_and_count(refs, layers)
        return came, time.perf_counter() - start


@dataclass(frozen=True)
class Raylets:
    """Nodes on this machine, with the addresses 127.0.0.1, 127.0.0.2 and so on."""

    cluster: Cluster
    nodes: list[Any]

    @classmethod
    @contextmanager
    def start(cls, count: int, store_bytes: int, **system: Any) -> Iterator[Self]:
        # Without this Ray on Linux turns a loopback address into the host's own.
        ray_constants.ENABLE_RAY_CLUSTER = False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        options = {"object_store_memory": store_bytes, "include_dashboard": False, "num_cpus": 1}
        try:
            nodes = [
                cluster.add_node(
                    resources={f"node {n}": 1000},
                    node_ip_address=f"127.0.0.{n + 1}",
                    **({"_system_config": system} if system and n == 0 else {}),
                    **options,
                )
                for n in range(count)
            ]
            ray.init(cluster.address, log_to_driver=False, logging_level="warning")
            yield cls(cluster, nodes)
        finally:
            ray.shutdown()
            cluster.shutdown()

    def address(self, node: int) -> str:
        return str(self.nodes[node].node_ip_address)

    def on(self, node: int, remote: Any) -> Any:
        return remote.options(num_cpus=0, resources={f"node {node}": 1})

    def kill(self, node: int) -> None:
        """End a node without a word, as a lost machine does."""
        self.cluster.remove_node(self.nodes[node], allow_graceful=False)

    def made(self) -> list[int]:
        """Bytes made in each node's object store since its start, whether put or received."""
        ports = {node["NodeManagerAddress"]: node["NodeManagerPort"] for node in ray.nodes()}
        return [
            internal_api.node_stats(
                self.address(n), ports[self.address(n)], include_memory_info=False
            ).store_stats.cumulative_created_bytes
            for n in range(len(self.nodes))
        ]


DRIVER, ENGINES, POLICY = 0, (1, 2), (3, 4)


def measure(size: Size, way: Way, raylets: Raylets) -> dict[str, float]:
    """Store the routes of a step, and fetch them to every rank."""
    num_ranks = size.pp * size.dp
    nodes = [POLICY[rank * len(POLICY) // num_ranks] for rank in range(num_ranks)]
    addresses = [raylets.address(node) for node in nodes]
    limit = object_bytes(addresses, size.pp) if way == "rule" else OBJECT_BYTES
    homes = {node: DRIVER if way == "one" else node for node in ENGINES}
    stores = {home: raylets.on(home, RouteStore).remote() for home in sorted(set(homes.values()))}
    of_engine = {raylets.address(node): stores[home] for node, home in homes.items()}
    engine = ray.remote(Engine)
    engines = [raylets.on(n, engine).remote(size, of_engine, limit) for n in ENGINES]
    ranks = [raylets.on(node, ray.remote(Rank)).remote() for node in nodes]
    ray.get([actor.__ray_ready__.remote() for actor in (*stores.values(), *engines, *ranks)])
    before = raylets.made()
    refs, storing = generate(size, engines)
    stored = raylets.made()
    needs = [needed(size, refs, rank) for rank in range(num_ranks)]
    calls = [rank.fetch.remote(*need) for rank, need in zip(ranks, needs, strict=True)]
    fetched = ray.get(calls)
    came = raylets.made()
    return {
        # The driver's node made each of these twice: as it came, and as its store put it.
        "moved_bytes": (stored[DRIVER] - before[DRIVER]) // 2
        + sum(came[node] - stored[node] for node in POLICY),
        "counted_bytes": sum(bytes_by_link(came for came, _ in fetched).values()),
        "minimum_bytes": minimum(size, addresses, needs),
        "objects": len({block for (ref,) in refs for block in ref.blocks}),
        "store_seconds": storing,
        "fetch_seconds": max(seconds for _, seconds in fetched),
    }


def generate(size: Size, engines: Sequence[Any]) -> tuple[list[SampleRoutes], float]:
    """References to the routes of samples of half to all of ``size.tokens``, and the seconds."""
    draw = np.random.default_rng(0)
    lens = draw.integers(size.tokens // 2, size.tokens + 1, size.samples)
    tokens = [draw.integers(0, 50_000, n) for n in lens]
    calls = [
        tokens[i : i + size.samples_per_call] for i in range(0, len(tokens), size.samples_per_call)
    ]
    start = time.perf_counter()
    answers = [engines[n % len(engines)].generate.remote(call) for n, call in enumerate(calls)]
    refs = [(ref,) for answer in ray.get(answers) for ref in answer[0]]
    return refs, time.perf_counter() - start


def needed(
    size: Size, refs: Sequence[SampleRoutes], rank: int
) -> tuple[list[SampleRoutes], tuple[int, ...]]:
    """The sequences and layers of one rank."""
    plan = plan_step([ref.rows + 1 for (ref,) in refs], 1, size.dp, size.micro_batch_tokens)
    layers = route_layers(size.pipeline, size.layers, size.shape.moe_layers, rank // size.dp)
    return [refs[i] for i in plan.shards[rank % size.dp]], layers


def minimum(
    size: Size,
    addresses: Sequence[str],
    needs: Sequence[tuple[list[SampleRoutes], tuple[int, ...]]],
) -> int:
    """Bytes that the policy's nodes, which have no engine, cannot do without."""
    cells = {
        (address, id(ref), layer): ref.rows
        for address, (refs, layers) in zip(addresses, needs, strict=True)
        for (ref,) in refs
        for layer in layers
    }
    return sum(cells.values()) * size.route_bytes(1, 1) // size.tokens


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.route_links")
    parser.add_argument("--out", type=Path)
    defaults = Size(samples=128, tokens=512, pp=1, dp=2)
    for name in ("samples", "tokens", "layers", "experts", "k", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    size = replace(defaults, **options)
    result = Result("route_links", settings=vars(size))
    with Raylets.start(
        5, int(4 * size.route_bytes(size.samples, size.layers)) + (100 << 20)
    ) as nodes:
        for way in get_args(Way):
            for name, value in measure(size, way, nodes).items():
                result.measure(f"{way}_{name}", value)
    result.write(out)


if __name__ == "__main__":
    main(sys.argv[1:])
