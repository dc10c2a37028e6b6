"""What the policy worker adds to what Megatron costs, and what routing replay does.

    python -m benchmarks.train [--layers N] [--shapes NAME=SEQUENCESxTOKENSxMICRO_BATCHES ...]
        [--variants NAME ...] [--rounds N] [--kept-softmax-gib GIB] [--device cpu] [--out FILE]
        [--profile FOLDER]

Forward and backward passes of a slice of Qwen3-30B-A3B with random weights, in one process, without
an optimizer step. Every round runs all variants in a random order. Ratios are of the
same round. R2 and R3 replay the routes that the model chooses natively, so experts have
the same loads in all variants.

- bare: Megatron's own model, loss and schedule, nothing of ours (`benchmarks.bare_megatron`), with
  the fused router;
- native: the policy worker without replay; native_fused_router: the same with Megatron's fused
  router, which cannot replay;
- r2, r3: the policy worker on recorded routes, and on a rollout engine's;
- without_X: r3 with one thing off that is on by default.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.models import random_model, random_slice
from benchmarks.profile import profiled
from benchmarks.result import Result, median_interval
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import pack_micro_batches
from rltrain.routing.align import last_rows
from rltrain.routing.codec import decode

if TYPE_CHECKING:  # Megatron has to be patched first
    from rltrain.policy.worker import PolicyWorker

SHAPES = ("gpu_bound=16x2048x2", "launch_bound=2x512x4")
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 512,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
"""For a CPU."""


@dataclass(frozen=True)
class Shape:
    name: str
    sequences: int
    """A micro-batch."""
    length: int
    micro_batches: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        name, _, sizes = text.partition("=")
        sequences, length, micro_batches = (int(size) for size in sizes.split("x"))
        return cls(name, sequences, length, micro_batches)

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.length * self.micro_batches

    def batch(self, vocab_size: int, seed: int) -> tuple[Batch, list[list[int]]]:
        """Random tokens, all but the first of each sequence a response; and its micro-batches."""
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocab_size, (self.num_tokens,), generator=draw)
        lens = torch.full((self.sequences * self.micro_batches,), self.length)
        first = torch.arange(self.num_tokens) % self.length == 0
        batch = Batch(
            tokens=tokens,
            seq_lens=lens,
            response_mask=~first,
            old_logprobs=torch.full((self.num_tokens,), -12.0).where(~first, 0.0),
            advantages=torch.randn(self.num_tokens, generator=draw),
            loss_weights=(~first).float() / (~first).sum(),
        )
        plan = pack_micro_batches([lens.tolist()], self.sequences * self.length)[0]
        assert len(plan) == self.micro_batches
        return batch, plan


class Bench:
    """One worker and one bare model, and what can be asked of them on a shape."""

    def __init__(self, worker: "PolicyWorker", bare: Any, shape: Shape) -> None:
        from benchmarks.bare_megatron import packed

        self.worker, self.bare, self.shape = worker, bare, shape
        batch, self.plan = shape.batch(worker.arch.vocab_size, seed=0)
        worker.begin_step(batch)
        worker.score(self.plan, routing="native", record=True)
        assert worker.recorded_routes is not None
        self.routes = worker.recorded_routes
        self.batch = batch.with_fields(
            rollout_expert_indices=self.routes, route_mask=~last_rows(batch.seq_lens)
        )
        worker.begin_step(self.batch)
        self.packed = packed(batch.tokens, shape.length, shape.sequences, worker.device)

    def busiest_expert(self) -> float:
        """Of a layer, over the mean; the layer where it is most."""
        num_experts = self.worker.arch.num_experts
        loads = [
            torch.bincount(decode(layer).flatten().cpu(), minlength=num_experts)
            for layer in self.routes.unbind(1)
        ]
        return max(float(load.max() / load.float().mean()) for load in loads)

    def update(self, routing: Any) -> None:
        """Forward and backward passes of an update, and its sums read, as `PolicyWorker.update`."""
        worker = self.worker
        worker.recorded_routes = self.routes if routing == "recorded" else None
        found = worker._accumulate(
            self.plan,
            worker._replaying(worker._shard(), routing),
            partial(worker._objective, 0.0),
            replay=routing != "native",
        )
        assert all(torch.isfinite(sums.totals["loss"]) for sums in found)

    def score(self, plan: list[list[int]]) -> None:
        self.worker.recorded_routes = None
        self.worker.score(plan, routing="rollout")

    def variants(self) -> dict[str, Callable[[], None]]:
        r3 = partial(self.update, "rollout")
        found: dict[str, Callable[[], None]] = {
            "bare": lambda: self.bare(self.packed),
            "native": partial(self.update, "native"),
            "native_fused_router": within(self.fused_router, partial(self.update, "native")),
            "r2": partial(self.update, "recorded"),
            "r3": r3,
        }
        for name, off in self.switches().items():
            found[f"without_{name}"] = within(off, r3)
        everything = [list(range(self.batch.num_sequences))]
        found["scoring_in_update_micro_batches"] = partial(self.score, self.plan)
        found["scoring_at_once"] = partial(self.score, everything)
        return found

    def switches(self) -> dict[str, Callable[[], Any]]:
        """What turns one thing off that is on by default."""
        if self.worker.device.type != "cuda":
            return {}
        config = self.worker.chunks[0].config
        found = {
            name: partial(mock.patch.object, config, name, False)
            for name in ("apply_rope_fusion", "bias_activation_fusion")
            if getattr(config, name)
        }
        found["gradient_accumulation_fusion"] = self.gradients_apart
        if self.shape.sequences * self.shape.length <= 4096:  # all logits, several times, in fp32
            found["deferred_head"] = self.whole_logits
        return found

    @contextmanager
    def fused_router(self) -> Iterator[None]:
        """Megatron's own, which never asks for a replayed choice, untapped."""
        fused = self.worker.device.type == "cuda"
        [routers] = self.worker.model.routers
        replays = {layer: router.router_replay for layer, router in routers.items()}
        config = self.worker.chunks[0].config
        try:
            for router in routers.values():
                router.router_replay = None
            with (
                mock.patch.object(config, "moe_router_fusion", fused),
                mock.patch.dict(vars(self.worker.model), routers=[{}], route_layers=[]),
            ):
                yield
        finally:
            for layer, router in routers.items():
                router.router_replay = replays[layer]

    @contextmanager
    def gradients_apart(self) -> Iterator[None]:
        """A product makes each weight's gradient, and another kernel adds it up."""
        flags = ("fuse_wgrad_accumulation", "into_main_grad")
        changed = [
            (module, flag)
            for module in self.worker.chunks[0].modules()
            for flag in flags
            if getattr(module, flag, False)
        ]
        try:
            for module, flag in changed:
                setattr(module, flag, False)
            yield
        finally:
            for module, flag in changed:
                setattr(module, flag, True)

    @contextmanager
    def whole_logits(self) -> Iterator[None]:
        with (
            mock.patch("rltrain.policy.logprobs.head.head_weight", return_value=None),
            mock.patch("rltrain.policy.passes.passes.head_weight", return_value=None),
        ):
            yield


def within(context: Callable[[], Any], run: Callable[[], None]) -> Callable[[], None]:
    def inside() -> None:
        with context():
            run()

    return inside


def measure(
    bench: Bench, wanted: Sequence[str], rounds: int, result: Result, profiles: Path | None
) -> dict[str, list[float]]:
    """Seconds of every variant, by round; a variant that fails says so and is left out."""
    name, tokens = bench.shape.name, bench.shape.num_tokens
    variants = {v: run for v, run in bench.variants().items() if not wanted or v in wanted}
    for variant, run in [*variants.items()]:
        try:
            for _ in range(3):
                timed(run)
        except Exception as error:
            print(f"{name} {variant}: failed: {type(error).__name__}: {error}", flush=True)
            del variants[variant]
            _release()
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    order, shuffled = [*variants], random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for variant in order:
            seconds[variant].append(timed(variants[variant]))
    for variant, run in variants.items():
        typical = median(seconds[variant])
        result.measure(f"{name}/{variant}_tokens_per_second", tokens / typical)
        line = f"{name} {variant}: {typical:.4f} s, {tokens / typical:,.0f} tokens/s"
        if torch.cuda.is_available() and bench.worker.device.type == "cuda":
            file = profiles / f"train-{name}-{variant}.txt" if profiles else None
            found = profiled(run, file)
            result.measure(f"{name}/{variant}_gpu_busy_fraction", found.gpu_seconds / typical)
            result.measure(f"{name}/{variant}_gpu_seconds", found.gpu_seconds)
            result.measure(f"{name}/{variant}_kernels", found.kernels)
            line += f", GPU busy {found.gpu_seconds / typical:.3f}, {found.kernels} kernels"
        print(line, flush=True)
    return seconds


def ratios(name: str, seconds: Mapping[str, Sequence[float]], result: Result) -> None:
    """Speeds over ceilings of the same round; the fastest native is the one of the best median."""
    if {"native", "native_fused_router"} <= seconds.keys():
        fastest = min("native", "native_fused_router", key=lambda native: median(seconds[native]))
        seconds = {**seconds, "fastest_native": seconds[fastest]}
    targets = {
        ("r3", "native"): 1.0,
        ("r2", "native"): 1.0,
        ("r3", "fastest_native"): 0.97,
        ("native", "bare"): 0.95,
        ("r3", "bare"): 0.95,
        ("scoring_at_once", "scoring_in_update_micro_batches"): None,
        **{("r3", other): None for other in seconds if other.startswith("without_")},
    }
    for (ours, ceiling), target in targets.items():
        if ours in seconds and ceiling in seconds:
            pairs = zip(seconds[ours], seconds[ceiling], strict=True)
            found = median_interval([theirs / own for own, theirs in pairs])
            result.ratio(f"{name}/{ours}_over_{ceiling}", found, target)


def timed(run: Callable[[], None]) -> float:
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def build(args: argparse.Namespace, folder: Path) -> tuple["PolicyWorker", Any]:
    from rltrain.patches.megatron import patch_megatron
    from rltrain.patches.megatron_cpu import patch_megatron_for_cpu

    if args.device == "cpu":
        patch_megatron_for_cpu()
    patch_megatron()
    from benchmarks.bare_megatron import BareMegatron
    from rltrain.policy.actor import num_threads
    from rltrain.policy.ranks import rendezvous
    from rltrain.policy.worker import PolicyWorker

    if args.device == "cpu":
        random_model(folder / "model", TINY)
        model = folder / "model"
    else:
        model = random_slice(args.cache, layers=args.layers, skew=args.skew)
    config = Config.model_validate(
        {
            "cluster": {"device": args.device},
            "routing_replay": {"mode": "r3"},
            "policy": {
                "max_tokens_per_micro_batch": 2**20,
                "kept_softmax_gib": args.kept_softmax_gib,
            },
        }
    )
    torch.set_num_threads(num_threads(config, args.device))
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    print("loading the policy worker", flush=True)
    worker = PolicyWorker(config, 0, rendezvous(folder, "train"), str(model), device)
    options: dict[str, Any] = {}
    if args.device == "cuda":
        options = {
            "moe_router_fusion": True,
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": args.bare_loss,
        }
    print("building bare Megatron", flush=True)
    like = worker.chunks[0].module
    bare = BareMegatron(worker.arch, config.policy, worker.mesh, device, like, options)
    return worker, bare


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _release() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--skew", type=float, default=0.0, help="see benchmarks.models")
    parser.add_argument(
        "--kept-softmax-gib", type=float, default=0.0, help="of the worker's policy"
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", default=[], help="those above; default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bare-loss", choices=("te", "native"), default="te")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "bench-models")
    parser.add_argument("--profile", type=Path, help="a folder for tables of kernels")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    settings = {**vars(args), "cache": None, "profile": None, "out": None}
    result = Result("train", settings={k: v for k, v in settings.items() if v is not None})
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rltrain-bench-"))
        worker, bare = build(args, Path(folder))
        # While the file that ranks meet by is still there: a process group waits for it at exit.
        stack.callback(torch.distributed.destroy_process_group)
        for text in args.shapes:
            bench = Bench(worker, bare, Shape.parse(text))
            name = f"{bench.shape.name}/busiest_expert_over_mean"
            result.measure(name, bench.busiest_expert())
            seconds = measure(bench, args.variants, args.rounds, result, args.profile)
            ratios(bench.shape.name, seconds, result)
            if torch.cuda.is_available():
                peak = torch.cuda.max_memory_allocated() / 2**30
                result.measure(f"{bench.shape.name}/peak_memory_gib", peak)
            result.write(args.out)


if __name__ == "__main__":
    main()
