"""Weight sync against what its parts take alone: vLLM's loading, a device copy, NCCL.

    python -m benchmarks.weight_sync [--out FILE] [--transport ipc|broadcast] [--layers 4]
        [--rounds 7] [--device cuda] [name=value ...]

The trainer's policy workers, rollout engine and `WeightSync`, on a slice of Qwen3-30B-A3B with
random weights (``--layers 0``: the tiny model of the recipes). ``ipc`` has both on one GPU,
``broadcast`` on two. Every round measures:

- a sync, and then a request for one token: from the pause to the first token;
- vLLM's own start, update and finish, fed with ready tensors on its device, then such a request;
- the policy's stream of tensors alone, which nobody reads: gathering and naming, of the whole model
  on every rank and of each pipeline stage on its own ranks;
- a plain copy of as many bytes on the device.

With ``broadcast``, afterwards, NCCL's own broadcast of as many bytes.

The first round is warm-up. ``name=value`` overrides a key of +recipe=grpo_moe_r3.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.models import random_slice
from benchmarks.result import Result, median_interval
from rltrain.config import Config
from rltrain.controller.cluster.engines import Engines, engine_spec, get_all_of_engines
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.ray_cluster import Cluster, cluster
from rltrain.controller.weight_links import Connection, SyncNodes
from rltrain.controller.weight_sync import Filling, WeightSync
from rltrain.data.tiny_model import build_random_model
from rltrain.main import compose
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.planning.weight_transport import choose_transport
from rltrain.rollout.requests import Request, SamplingParams
from rltrain.weights.families import model_parameters, read_architecture
from rltrain.weights.sync.broadcast import BroadcastGroup
from rltrain.weights.sync.stream import BUCKET_BYTES, Bucket

MODELS = Path("~/.cache/rltrain/benchmarks").expanduser()
LIMIT_S = 300.0
Times = dict[str, float]


class TimedSync(WeightSync):
    """Knows how long its parts took, and how long it asked the policy for buckets meanwhile."""

    def sync(self, dtype: str) -> dict[str, float]:
        self.parts = dict.fromkeys(("begin_s", "load_s", "finish_s", "policy_s"), 0.0)
        self.buckets = [0] * len(self.policy.stages)
        return super().sync(dtype)

    def _begin(self, dtype: str, connection: Connection) -> list[Filling]:
        with self._timed("begin_s"):
            return super()._begin(dtype, connection)

    def _load(self, first: Sequence[Filling], connection: Connection) -> list[int]:
        with self._timed("load_s"):
            return super()._load(first, connection)

    def _finish(self) -> None:
        with self._timed("finish_s"):
            super()._finish()

    def _filled(self, filling: Filling) -> Bucket | None:
        with self._timed("policy_s"):
            bucket = super()._filled(filling)
        if bucket is not None:
            self.buckets[bucket["stage"]] += 1
        return bucket

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[part] += time.perf_counter() - start


def configuration(path: Path, folder: str, args: argparse.Namespace) -> Config:
    shared = args.transport == "ipc"
    gpus = [f"cluster.num_gpus={1 if shared else 2}"] if args.device == "cuda" else []
    return compose(
        [
            "+recipe=grpo_moe_r3",
            "routing_replay=off",
            "routing_replay.capture=false",
            f"model.path={path}",
            f"trainer.output_dir={folder}",
            f"cluster.device={args.device}",
            f"cluster.placement={'colocated' if shared else 'disaggregated'}",
            f"rollout.weight_transfer={args.transport}",
            "rollout.gpu_memory_utilization=0.25",
            *gpus,
            *args.overrides,
        ]
    )


def first_token(engine: Any, number: int) -> None:
    request = Request(tuple(range(5, 21)), seed=number, prompt_id=str(number), sample_index=0)
    sampling = SamplingParams(temperature=1.0, max_tokens=1)
    get_all_of_engines([engine.generate.remote([request], sampling)], "generate", LIMIT_S)


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def one_round(sync: TimedSync, config: Config, number: int) -> Times:
    [engine] = sync.engines.actors
    found: Times = {}
    found["sync_s"] = timed(lambda: sync.sync(config.rollout.dtype))
    found["sync_first_token_s"] = found["sync_s"] + timed(lambda: first_token(engine, number))
    found |= {f"sync_{part}": seconds for part, seconds in sync.parts.items()}
    found["vllm_s"], nbytes = ray.get(engine.measure.remote("load_ready"))
    found["vllm_first_token_s"] = found["vllm_s"] + timed(lambda: first_token(engine, number))
    found["device_copy_s"] = ray.get(engine.measure.remote("copy", nbytes))
    dtype = config.rollout.dtype
    found["gather_and_name_s"] = timed(lambda: whole_alone(sync, dtype))
    found["stages_gather_and_name_s"] = timed(lambda: stages_alone(sync, dtype))
    found["bytes"] = float(nbytes)
    return found


def whole_alone(sync: TimedSync, dtype: str) -> None:
    """Every rank gathers the model, and none of them sends: there is no receiver."""
    sync.policy.begin_weight_stream(dtype, "ipc", [])
    everyone = list(chain.from_iterable(sync.policy.stages))
    for _ in range(sum(sync.buckets)):
        sync.policy.next_weight_buckets(everyone)()
    sync.policy.end_weight_stream()


def stages_alone(sync: TimedSync, dtype: str) -> None:
    """Every rank gathers the tensors of its pipeline stage, and none of them sends."""
    sync.policy.begin_weight_stream(dtype, "broadcast", [])
    filling = [
        sync.policy.next_weight_buckets(ranks)
        for ranks, count in zip(sync.policy.stages, sync.buckets, strict=True)
        for _ in range(count)
    ]
    for wait in filling:
        wait()
    sync.policy.end_weight_stream()


def measure(config: Config, path: Path, rounds: int) -> list[Times]:
    from benchmarks.weight_sync_engine import MeasuredEngine

    with cluster(config) as placed:
        arch = read_architecture(path)
        spec = engine_spec(config, path, arch, placed)
        actor = ray.remote(MeasuredEngine).options(**placed.engine_options(0))
        engine = actor.remote(spec)
        get_all_of_engines([engine.start.remote()], "start", LIMIT_S)
        say("the engine is ready")
        policy = PolicyGroup(config, str(path), placed)
        say("the policy is ready")
        nodes = SyncNodes(placed.policy_nodes, placed.engine_nodes)
        engines = Engines([engine], LIMIT_S, LIMIT_S)
        sync = TimedSync(policy, engines, transport_of(config, placed), nodes)
        found = []
        for number in range(rounds + 1):
            found.append(one_round(sync, config, number))
            say(", ".join(f"{name} {value:.4g}" for name, value in found[-1].items()))
        return found[1:]


def transport_of(config: Config, placed: Cluster) -> Any:
    return choose_transport(config.rollout.weight_transfer, placed.placement)


# NCCL alone


def broadcast_alone(nbytes: int, device: str, rounds: int) -> list[float]:
    """Seconds that broadcasts of ``nbytes`` take from one GPU to another, a bucket each."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = (Rendezvous.local(2), nbytes, device, rounds, queue)
    ranks = [context.Process(target=_broadcast, args=(n, *arguments)) for n in range(2)]
    for rank in ranks:
        rank.start()
    found: list[float] = queue.get()
    for rank in ranks:
        rank.join()
    return found


def _broadcast(
    rank: int, meeting: Rendezvous, nbytes: int, device: str, rounds: int, queue: Any
) -> None:
    own = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(own)
    group = BroadcastGroup(meeting, rank, own, 60.0, 60.0)
    size = BUCKET_BYTES
    buffers = [torch.zeros(size, dtype=torch.uint8, device=own) for _ in range(2)]
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        left, slot = nbytes, 0
        while left > 0:
            group.broadcast(buffers[slot][:left]).wait()
            left, slot = left - size, 1 - slot
        if device == "cuda":
            torch.cuda.synchronize(own)
        found.append(time.perf_counter() - start)
    if rank == 1:
        queue.put(found[1:])


# The result


def report(result: Result, rounds: list[Times], alone: list[float]) -> None:
    nbytes = rounds[0]["bytes"]
    for name in rounds[0]:
        result.measure(name, statistics.median(each[name] for each in rounds))
    for name in ("sync_s", "vllm_s", "device_copy_s", "gather_and_name_s"):
        rate = nbytes / statistics.median(each[name] for each in rounds) / 1e9
        result.measure(f"{name.removesuffix('_s')}_gb_per_s", rate)

    def over(ceiling: str, ours: str) -> Any:
        return median_interval([each[ceiling] / each[ours] for each in rounds])

    result.ratio("sync_over_vllm", over("vllm_s", "sync_s"), target=0.8)
    result.ratio("sync_to_first_token_over_vllm", over("vllm_s", "sync_first_token_s"), target=0.8)
    result.ratio(
        "first_token_over_vllm_first_token", over("vllm_first_token_s", "sync_first_token_s")
    )
    result.ratio("stages_over_whole_gather", over("gather_and_name_s", "stages_gather_and_name_s"))
    result.ratio("sync_over_device_copy", over("device_copy_s", "sync_s"), target=0.1)
    if alone:
        nccl = statistics.median(alone)
        result.measure("broadcast_alone_s", nccl)
        result.measure("broadcast_alone_gb_per_s", nbytes / nccl / 1e9)
        found = median_interval([nccl / each["sync_s"] for each in rounds])
        result.ratio("sync_over_broadcast", found, target=0.8)


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_sync")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--transport", choices=("ipc", "broadcast"), default="ipc")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(arguments)
    path = (
        random_slice(MODELS, layers=args.layers)
        if args.layers
        else build_random_model(compose(["+recipe=grpo_moe_r3"]).model)
    )
    say(f"the model is in {path}")
    settings = {n: v for n, v in vars(args).items() if n != "out"}
    result = Result("weight_sync", settings=settings)
    result.measure("naming_s", timed(lambda: list(model_parameters(read_architecture(path)))))
    with tempfile.TemporaryDirectory(prefix="rltrain-weight-sync-") as folder:
        rounds = measure(configuration(path, folder, args), path, args.rounds)
    alone = []
    if args.transport == "broadcast":
        alone = broadcast_alone(int(rounds[0]["bytes"]), args.device, args.rounds)
    report(result, rounds, alone)
    result.write(args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
