"""What the gate on routes costs a step that it measures, on this machine.

    python -m benchmarks.route_gate [--layers 4] [--shape name=SEQUENCESxLENGTHxMICRO_BATCHES] ...

One worker replays its own routes. The gate's cost is the comparison in the pass that records the
routers' choices, and the search for wide flips. The step is that pass, the native one and an
update, without generation, rewards and weight sync. So the share is an upper bound. Both are timed
in one run. On a CPU, processor seconds are counted, because other jobs may use the machine. The
gate is the small difference of two long passes. So it is timed in every round, and the rest of the
step in every tenth.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.models import random_model, random_slice
from benchmarks.result import Interval, Result, median_interval
from benchmarks.train import TINY, Shape
from benchmarks.train import timed as wall_time
from rltrain.config import Config
from rltrain.controller.checks.route_gate import (
    flip_metrics,
    narrow_bins,
    noise_scales,
    wrong_routes,
)
from rltrain.routing.align import last_rows

if TYPE_CHECKING:
    from rltrain.policy.worker import PolicyWorker

GATE = ("recording", "recording_and_comparing", "judging")
STEP_EVERY = 10


def start(args: argparse.Namespace, folder: Path) -> "PolicyWorker":
    from rltrain.patches.megatron import patch_megatron
    from rltrain.patches.megatron_cpu import patch_megatron_for_cpu

    if args.device == "cpu":
        patch_megatron_for_cpu()
    patch_megatron()
    from rltrain.policy.ranks import rendezvous
    from rltrain.policy.worker import PolicyWorker

    model = folder / "model"
    if args.device == "cpu":
        random_model(model, TINY)
    else:
        model = random_slice(args.cache, layers=args.layers, skew=0.0)
    config = Config.model_validate(
        {
            "cluster": {"device": args.device},
            "routing_replay": {"mode": "r3"},
            "policy": {"max_tokens_per_micro_batch": 2**20},
        }
    )
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    return PolicyWorker(config, 0, rendezvous(folder, "gate"), str(model), device)


def parts(worker: "PolicyWorker", shape: Shape) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    from rltrain.policy.passes.passes import score

    batch, plan = shape.batch(worker.arch.vocab_size, seed=0)
    worker.begin_step(batch)
    worker.score(plan, routing="native", record=True)
    batch = batch.with_fields(
        rollout_expert_indices=worker.recorded_routes, route_mask=~last_rows(batch.seq_lens)
    )
    worker.begin_step(batch)
    shard = worker._replaying(worker._shard(), "rollout")
    cuts = worker._cut(plan, shard)
    recorded = partial(score, worker.model, cuts, batch.num_tokens, replay=True, record=True)
    agreement = worker.score(plan, routing="rollout", measure=True).agreement  # type: ignore[union-attr]
    assert agreement is not None

    def judge() -> None:
        noise = noise_scales(agreement)
        flips = worker.wide_flips(narrow_bins(agreement, noise))
        assert flips is not None
        assert wrong_routes(batch, agreement, flips, worker.arch.experts_per_token) is None
        flip_metrics(agreement, noise, flips)

    def update() -> None:
        objective = partial(worker._objective, 0.0)
        worker._accumulate(plan, shard, objective, replay=True)

    return {
        "recording": recorded,
        "recording_and_comparing": partial(recorded, compare=True),
        "judging": judge,
        "measured_pass": partial(worker.score, plan, routing="rollout", measure=True),
        "native_pass": partial(worker.score, plan, routing="native", measure=True),
        "update": update,
    }


def processor_time(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.route_gate")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", default="long=8x4096x2" if has_gpu else "tiny=8x256x2")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "bench-models")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    result = Result("route_gate", {n: getattr(args, n) for n in ("device", "layers", "shape")})
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as folder:
        worker = start(args, Path(folder))
        timed = wall_time if args.device == "cuda" else processor_time
        what = parts(worker, Shape.parse(args.shape))
        for run in what.values():
            run()
        seconds: dict[str, list[float]] = {name: [] for name in what}
        for i in range(args.rounds):
            for name, run in what.items():
                if name in GATE or i % STEP_EVERY == 0:
                    seconds[name].append(timed(run))
        torch.distributed.destroy_process_group()
    for name, times in seconds.items():
        result.measure(f"{name}_s", median_interval(times))
    step = sum(median(seconds[name]) for name in ("measured_pass", "native_pass", "update"))
    gates = [
        comparing - recording + judging
        for recording, comparing, judging in zip(*(seconds[name] for name in GATE), strict=True)
    ]
    share = median_interval([gate / step for gate in gates])
    result.measure("gate_over_step", share)
    rest = Interval(1 - share.value, 1 - share.high, 1 - share.low)
    result.ratio("step_without_gate_over_step", rest, target=0.99)
    result.write(args.out)


if __name__ == "__main__":
    main()
