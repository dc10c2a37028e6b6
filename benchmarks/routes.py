"""What routes cost on each hop from the engine to the routers: bytes and seconds of one step.

    python -m benchmarks.routes [--out FILE] [--samples 512] [--tokens 1024] [--layers 48]
        [--experts 128] [--k 8] [--pp 1] [--micro-batch-tokens 16384] [--rounds 5]

Routes are synthetic. Every hop is the trainer's code, on one node, one after the other:

- check: what `RolloutEngine` does before it lets routes in;
- store: encoded, put together and put into the object store by `RouteStore`;
- refs: what the controller gets, pickled;
- fetch: out of the store, laid on the token axis of one rank with all samples and stage 0's layers;
- send: to that rank's device, once a step, as they are;
- targets: each micro-batch's rows by layer, on the device.

In a run check, store and refs go on while other groups are generated. What capture costs vLLM
itself is in ``benchmarks.rollout``, what memory routes take in ``benchmarks.route_memory``.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.result import Result, median_interval
from benchmarks.route_memory import Size, made_up, pickled_bytes
from rltrain.batch import Batch, RouteRef
from rltrain.data.packing import plan_step
from rltrain.parallel.layer_map import route_blocks, route_layers
from rltrain.parallel.token_layout import TokenGrid
from rltrain.patches.megatron_cpu import patch_megatron_for_cpu
from rltrain.policy.passes.fetch_routes import fetch_routes
from rltrain.rollout.launch import RouteCapture
from rltrain.rollout.route_store import store_here, store_routes
from rltrain.routing.align import last_rows
from rltrain.routing.codec import RouteIds
from rltrain.routing.integrity import check_routes

GROUP = 8
"""Samples of a call."""


class Hops:
    """Seconds of each hop, round by round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, hop: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.setdefault(hop, []).append(time.perf_counter() - start)
        return found


def measure(size: Size, rounds: int) -> tuple[Hops, dict[str, int]]:
    """Times of every round after the first, and bytes."""
    rng = np.random.default_rng(0)
    captured = [made_up(rng, size.tokens, size) for _ in range(size.samples)]
    tokens = torch.randint(0, 50_000, (size.samples, size.tokens))
    blocks = route_blocks(size.pipeline, size.layers, size.shape.moe_layers)
    capture = RouteCapture(size.shape, store_here(), blocks)
    hops, found = Hops(), {"captured": sum(ids.nbytes for ids in captured)}
    for _ in range(rounds + 1):
        refs = from_engine(hops, captured, tokens, size, capture)
        found["refs"] = pickled_bytes(refs)
        found |= to_routers(hops, refs, tokens, size)
        del refs
    hops.seconds = {hop: seconds[1:] for hop, seconds in hops.seconds.items()}
    return hops, found


def from_engine(
    hops: Hops, captured: list[RouteIds], tokens: torch.Tensor, size: Size, capture: RouteCapture
) -> list[RouteRef]:
    """Calls of ``GROUP`` samples, as they come from an engine."""
    calls = [slice(i, i + GROUP) for i in range(0, size.samples, GROUP)]
    ids = tokens.tolist()
    checked = hops.time(
        "check",
        lambda: [check_routes(captured[c], ids[c], size.shape, ids[c], "made up") for c in calls],
    )

    async def store() -> list[list[RouteRef]]:
        return [await store_routes(call, capture, 0, "made up") for call in checked]

    stored = hops.time("store", lambda: asyncio.run(store()))
    return [ref for call in stored for ref in call]


def to_routers(
    hops: Hops, refs: list[RouteRef], tokens: torch.Tensor, size: Size
) -> dict[str, int]:
    """What one rank does; its bytes."""
    from rltrain.parallel.token_layout import to_device
    from rltrain.policy.passes.micro_batch import cut

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = route_layers(size.pipeline, size.layers, size.shape.moe_layers, 0)
    routes = hops.time(
        "fetch", lambda: torch.from_numpy(fetch_routes([(ref,) for ref in refs], layers))
    )
    found = {"fetched": routes.numel() * routes.element_size()}
    routes = hops.time("send", lambda: to_device(routes, device))
    lens = torch.full((size.samples,), size.tokens)
    mask = ~last_rows(lens)
    batch = Batch(
        tokens=tokens.flatten(),
        seq_lens=lens,
        response_mask=torch.ones(tokens.numel(), dtype=torch.bool),
        replay_expert_indices=routes,
        replay_mask=mask,
    )
    [plan] = plan_step(lens.tolist(), 1, 1, size.micro_batch_tokens).scoring
    micro_batches = cut(batch, plan, TokenGrid(), device)

    def targets() -> None:
        for micro_batch in micro_batches:
            micro_batch.route_targets(layers, layers, size.experts, record=False)

    hops.time("targets", targets)
    return found


def report(size: Size, rounds: int, hops: Hops, found: dict[str, int]) -> Result:
    result = Result("routes", settings={**vars(size), "rounds": rounds})
    for name, nbytes in found.items():
        result.measure(f"{name}_bytes", nbytes)
    tokens = size.samples * size.tokens
    for hop, seconds in hops.seconds.items():
        result.measure(f"{hop}_seconds", median_interval(seconds))
        per_second = median_interval([tokens / s for s in seconds])
        result.measure(f"{hop}_tokens_per_second", per_second)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    defaults = Size(tokens=1024, pp=1, dp=1, samples_per_call=GROUP)
    for name in ("samples", "tokens", "layers", "experts", "k", "pp", "micro_batch_tokens"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(defaults, name))
    options = vars(parser.parse_args(arguments))
    out, rounds = options.pop("out"), options.pop("rounds")
    size = Size(**options, dp=1, samples_per_call=GROUP)
    if not torch.cuda.is_available():
        patch_megatron_for_cpu()
    store_bytes = int(3 * size.route_bytes(size.samples, size.layers)) + (200 << 20)
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level="warning",
        object_store_memory=store_bytes,
    )
    try:
        report(size, rounds, *measure(size, rounds)).write(out)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
