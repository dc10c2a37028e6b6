"""What routes cost in memory, in every process they pass through, at their real size.

    python -m benchmarks.route_memory [name=value ...]      fields of `Size`; writes out=FILE.json

Two raylets on this machine, on loopback: an engine's process, the `RouteStore` and the controller
(this process) on node A, the policy's ranks on node B, one pipeline stage after the other. Routes
are synthetic. The code that moves them is the trainer's: `store_routes`, a `Batch` of references,
`plan_step`, `fetch_routes`, `cut` and the targets of a micro-batch.

The bound of a rank is tokens of its shard x layers of its stage x K bytes. Memory is what a process
shares with nobody: its anonymous pages, sampled every millisecond for the peak, and USS. A page of
the object store is neither, wherever it is mapped; it counts once, with its node.
"""

import asyncio
import gc
import json
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import ray
import torch
from ray._private import ray_constants, state
from ray.cluster_utils import Cluster

from rltrain.batch import Batch, RouteRef
from rltrain.data.packing import plan_step
from rltrain.parallel.layer_map import Pipeline, route_blocks, route_layers
from rltrain.parallel.token_layout import TokenGrid
from rltrain.policy.passes.fetch_routes import fetch_routes
from rltrain.rollout.launch import RouteCapture
from rltrain.rollout.route_store import RouteStore, store_routes
from rltrain.routing.align import last_rows
from rltrain.routing.codec import RouteIds, route_dtype, token_checksum
from rltrain.routing.integrity import CheckedRoutes, RouteShape
from rltrain.routing.objects import OBJECT_BYTES

MB = 1e6


@dataclass(frozen=True)
class Size:
    samples: int = 512
    tokens: int = 4096  # of a sample, prompt and response
    layers: int = 48
    experts: int = 128
    k: int = 8
    pp: int = 4
    dp: int = 2
    samples_per_call: int = 8  # of the engine's that are put into the store together
    micro_batch_tokens: int = 16384

    @property
    def shape(self) -> RouteShape:
        return RouteShape(self.layers, tuple(range(self.layers)), self.experts, self.k)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.pp)

    def route_bytes(self, samples: int, layers: int) -> int:
        """The bound, for whole sequences: the row of the last token is counted, as it is held."""
        itemsize = route_dtype(self.experts).itemsize
        return samples * self.tokens * layers * self.k * itemsize


class Memory:
    """Anonymous memory of this process from its creation on, and its peak."""

    def __init__(self) -> None:
        gc.collect()
        self._process = psutil.Process()
        self._uss = self._process.memory_full_info().uss
        self._start = self._peak = self._anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    @staticmethod
    def _anonymous() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("expected RssAnon in /proc/self/status, which Linux has had since 4.5")

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, self._anonymous())

    def stop(self) -> dict[str, int]:
        """Growth in bytes: ``held`` and ``uss`` now, and the ``peak`` since the start."""
        self._done.set()
        self._thread.join()
        gc.collect()
        held = self._anonymous()
        return {
            "held": held - self._start,
            "peak": max(self._peak, held) - self._start,
            "uss": self._process.memory_full_info().uss - self._uss,
        }


# Node A


class Engine:
    """Makes routes up and stores them as a rollout engine does."""

    def __init__(
        self, size: Size, stores: dict[str, Any], object_bytes: int = OBJECT_BYTES
    ) -> None:
        self._size = size
        blocks = route_blocks(size.pipeline, size.layers, size.shape.moe_layers)
        self._capture = RouteCapture(size.shape, stores, blocks, object_bytes=object_bytes)
        self._rng = np.random.default_rng(0)
        self._peak = 0

    def generate(self, tokens: RouteIds) -> tuple[list[RouteRef], float]:
        """References to routes for ``tokens`` [samples, tokens], and the seconds to store them."""
        ids = [made_up(self._rng, len(sample), self._size) for sample in tokens]
        routes = [
            CheckedRoutes(i, token_checksum(t.tolist())) for i, t in zip(ids, tokens, strict=True)
        ]
        memory, start = Memory(), time.perf_counter()
        refs = asyncio.run(store_routes(routes, self._capture, 0, "made up"))
        seconds = time.perf_counter() - start
        self._peak = max(self._peak, memory.stop()["peak"])
        return refs, seconds

    def peak(self) -> int:
        """The most that storing one call's routes added to what they are themselves."""
        return self._peak


def made_up(rng: np.random.Generator, num_tokens: int, size: Size) -> RouteIds:
    """``[tokens - 1, L, K]`` uint8 or uint16; an odd stride makes a row's experts distinct."""
    rows = (num_tokens - 1, size.layers, 1)
    first = rng.integers(0, size.experts, rows, dtype=np.uint16)
    stride = 2 * rng.integers(0, size.experts // 2, rows, dtype=np.uint16) + 1
    ids = (first + stride * np.arange(size.k, dtype=np.uint16)) % size.experts
    return ids.astype(np.uint8 if size.experts <= 256 else np.uint16)


# Node B


class Rank:
    """What one policy rank does with routes, from `begin_step` to the targets of its routers."""

    def __init__(self, size: Size, stage: int) -> None:
        from rltrain.patches.megatron_cpu import patch_megatron_for_cpu

        torch.set_num_threads(1)
        if not torch.cuda.is_available():
            patch_megatron_for_cpu()
        import rltrain.policy.passes.micro_batch  # noqa: F401  so that it is in no measurement

        self._size = size
        self._layers = route_layers(size.pipeline, size.layers, size.shape.moe_layers, stage)

    def take(self, shard: Batch, plan: list[list[int]]) -> None:
        """The shard has arrived, its routes have not."""
        self._shard, self._plan = shard, plan

    def fetch(self) -> dict[str, Any]:
        """Routes of the shard, as `PolicyWorker.begin_step` gets them."""
        refs = self._shard.rollout_expert_indices
        assert isinstance(refs, tuple)
        memory, start = Memory(), time.perf_counter()
        with traced() as numpy_peak:
            routes = torch.from_numpy(fetch_routes(refs, self._layers))
        seconds = time.perf_counter() - start
        self._shard = self._shard.with_fields(rollout_expert_indices=routes)
        return memory.stop() | {
            "numpy_peak": numpy_peak[0],
            "bytes": routes.numel() * routes.element_size(),
            "bound": self._size.route_bytes(self._shard.num_sequences, len(self._layers)),
            "seconds": seconds,
        }

    def gather(self) -> dict[str, Any]:
        """What micro-batches add to that: the most while each one's targets are made in turn."""
        from rltrain.policy.passes.micro_batch import cut

        routes, mask = self._shard.require("rollout_expert_indices", "route_mask")
        bare = self._shard.with_fields(rollout_expert_indices=None)
        replaying = self._shard.with_fields(replay_expert_indices=routes, replay_mask=mask)
        memory = Memory()
        # Kept, so that what follows cannot be laid where it was.
        kept = cut(bare.with_fields(replay_mask=mask), self._plan, TokenGrid(), torch.device("cpu"))
        without_routes = memory.stop()["held"]
        memory, start = Memory(), time.perf_counter()
        micro_batches = cut(replaying, self._plan, TokenGrid(), torch.device("cpu"))
        for mb in micro_batches:
            mb.route_targets(self._layers, self._layers, self._size.experts, record=False)
        seconds = time.perf_counter() - start
        found = memory.stop()
        return {
            "peak": found["peak"] - without_routes,
            "held": found["held"] - without_routes,
            "seconds": seconds,
            "micro_batches": len(kept),
        }


@contextmanager
def traced() -> Iterator[list[int]]:
    """The peak of what Python and numpy allocate, exactly; a list that is filled at the end."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


# The controller


@dataclass(frozen=True)
class Nodes:
    """The two raylets."""

    a: Any
    b: Any
    capacity: int  # of each object store

    @classmethod
    @contextmanager
    def start(cls, store_bytes: int) -> Iterator[Self]:
        # Without this Ray on Linux turns a loopback address into the host's own.
        ray_constants.ENABLE_RAY_CLUSTER = False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        options = {"object_store_memory": store_bytes, "include_dashboard": False}
        options |= {"node_ip_address": "127.0.0.1", "num_cpus": 1}
        # All that is in a store shall count, also what a node merely received.
        counted = {"scheduler_report_pinned_bytes_only": False}
        try:
            a = cluster.add_node(resources={"A": 1000}, _system_config=counted, **options)
            b = cluster.add_node(resources={"B": 1000}, **options)
            ray.init(cluster.address, log_to_driver=False, logging_level="warning")
            yield cls(a, b, store_bytes)
        finally:
            ray.shutdown()
            cluster.shutdown()

    def store_bytes(self) -> tuple[int, int]:
        """Bytes in use in the object stores of A and B, once they stand still."""
        seen: list[tuple[int, int]] = []
        while len(seen) < 4 or len(set(seen[-4:])) > 1:
            time.sleep(0.5)  # raylets report several times a second
            free = state.available_resources_per_node()
            used = [
                self.capacity - int(free[node.node_id]["object_store_memory"])
                for node in (self.a, self.b)
            ]
            seen.append((used[0], used[1]))
        return seen[-1]


def measure(size: Size) -> dict[str, Any]:
    """Carry one step's routes from the engine to every rank; the numbers, in bytes and seconds."""
    assert size.samples % size.samples_per_call == 0, size
    whole = size.route_bytes(size.samples, size.layers)
    with Nodes.start(max(200 << 20, int(1.3 * whole) + (100 << 20))) as nodes:
        stores = {nodes.a.node_ip_address: on("A", RouteStore).remote()}
        engine = on("A", ray.remote(Engine)).remote(size, stores)
        ray.get(engine.peak.remote())
        batch, controller, engine_found = rollouts(size, engine)
        found = {
            "size": asdict(size),
            "all_routes": whole,
            "controller": controller,
            "engine": engine_found,
            "node_a": nodes.store_bytes()[0],
            "stages": stages(size, batch, nodes),
        }
        del batch
        gc.collect()
        time.sleep(2)
        found["left_on_node_a"] = nodes.store_bytes()[0]
        return found


def on(node: str, remote: Any) -> Any:
    return remote.options(num_cpus=0, resources={node: 1})


def rollouts(size: Size, engine: Any) -> tuple[Batch, dict[str, Any], dict[str, Any]]:
    """The step's batch, what its routes cost the controller, and what storing them cost."""
    lens = torch.full((size.samples,), size.tokens)
    tokens = torch.randint(0, 50_000, (int(lens.sum()),))
    response = torch.ones(len(tokens), dtype=torch.bool)
    batch = Batch(tokens=tokens, seq_lens=lens, response_mask=response, route_mask=~last_rows(lens))
    calls = tokens.view(-1, size.samples_per_call, size.tokens).numpy()
    ray.get(engine.generate.remote(calls[0]))  # connections and code, once
    memory, start = Memory(), time.perf_counter()
    refs: list[RouteRef] = []
    seconds, pickled = 0.0, 0
    for call in calls:
        of_call, spent = ray.get(engine.generate.remote(call))
        pickled += pickled_bytes(of_call)
        seconds += spent
        refs += of_call
    batch = batch.with_fields(rollout_expert_indices=tuple(refs))
    elapsed = time.perf_counter() - start
    controller = memory.stop() | {
        "pickled": pickled,
        "pickled_per_sample": pickled / size.samples,
        "references": len({block for ref in refs for block in ref.blocks}),
    }
    stored = {"peak": ray.get(engine.peak.remote()), "seconds": seconds, "elapsed": elapsed}
    stored["call_bytes"] = size.route_bytes(size.samples_per_call, size.layers)
    return batch, controller, stored


def pickled_bytes(value: Any) -> int:
    """The size of a message that holds ``value``."""
    context = ray._private.worker.global_worker.get_serialization_context()
    return int(context.serialize(value).total_bytes)


def stages(size: Size, batch: Batch, nodes: Nodes) -> list[dict[str, Any]]:
    """Each pipeline stage in turn, alone on node B: its ranks, and what came to B for them."""
    plan = plan_step(batch.seq_lens.tolist(), 1, size.dp, size.micro_batch_tokens)
    shards = [ray.put(batch.select(rows)) for rows in plan.shards]
    rank = on("B", ray.remote(Rank))
    found = []
    for stage in range(size.pp):
        ranks = [rank.remote(size, stage) for _ in shards]
        for actor, shard, micro_batches in zip(ranks, shards, plan.scoring, strict=True):
            ray.get(actor.take.remote(shard, micro_batches))
        before = nodes.store_bytes()[1]
        fetched = ray.get([r.fetch.remote() for r in ranks])
        layers = route_layers(size.pipeline, size.layers, size.shape.moe_layers, stage)
        found.append(
            {
                "stage": stage,
                "layers": layers,
                "share": size.route_bytes(size.samples, len(layers)),
                "came_to_b": nodes.store_bytes()[1] - before,
                "fetch": fetched,
                "gather": ray.get([r.gather.remote() for r in ranks]),
            }
        )
        for actor in ranks:
            ray.kill(actor)
    return found


def report(found: dict[str, Any]) -> str:
    """The table, in MB of 10^6 bytes; of a stage's ranks the largest."""
    controller, engine = found["controller"], found["engine"]
    rows = [
        ("where", "what", "MB", "share of the bound, MB"),
        ("node A", "all routes, in the object store", found["node_a"], found["all_routes"]),
        ("engine", "peak while one call is stored", engine["peak"], engine["call_bytes"]),
        ("controller", "references, pickled", controller["pickled"], 10 * MB),
        ("controller", "growth, USS", controller["uss"], 10 * MB),
        ("controller", "peak growth", controller["peak"], 10 * MB),
    ]
    for stage in found["stages"]:
        bound, held = stage["fetch"][0]["bound"], max(f["held"] for f in stage["fetch"])
        node, ranks = (
            f"node B, stage {stage['stage']} alone",
            f"each rank of stage {stage['stage']}",
        )
        rows += [
            (node, "came to the object store", stage["came_to_b"], stage["share"]),
            (ranks, "held, USS", max(f["uss"] for f in stage["fetch"]), bound),
            (ranks, "peak while fetched", max(f["peak"] for f in stage["fetch"]), bound),
            (
                ranks,
                "peak while micro-batches are cut and their targets made",
                held + max(g["peak"] for g in stage["gather"]),
                bound,
            ),
        ]
    lines = [
        f"| {where} | {what} | {n if isinstance(n, str) else f'{n / MB:.1f}'} | "
        f"{bound if isinstance(bound, str) else f'{n / bound:.3f} of {bound / MB:.1f}'} |"
        for where, what, n, bound in rows
    ]
    lines.insert(1, "|---|---|---|---|")
    hops = [f"engine to store {engine['seconds']:.1f} s"]
    for stage in found["stages"]:
        fetching = max(rank["seconds"] for rank in stage["fetch"])
        gathering = max(rank["seconds"] for rank in stage["gather"])
        hops.append(
            f"stage {stage['stage']} to its ranks {fetching:.1f} s, targets of "
            f"{stage['gather'][0]['micro_batches']} micro-batches {gathering:.1f} s"
        )
    per_sample = f"{controller['pickled_per_sample']:.0f} bytes of references per sample"
    left = f"left on node A after the step: {found['left_on_node_a']} bytes"
    return "\n".join([*lines, "", *hops, per_sample, left])


def main(overrides: Sequence[str]) -> None:
    given = dict(override.split("=", 1) for override in overrides)
    out = given.pop("out", "route_memory.json")
    size = replace(Size(), **{name: int(value) for name, value in given.items()})
    found = measure(size)
    Path(out).write_text(json.dumps(found, indent=2) + "\n")
    print(report(found))


if __name__ == "__main__":
    main(sys.argv[1:])
