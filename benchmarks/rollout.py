"""Generation by the trainer against vLLM alone: alternating, on one machine, in one run.

    python -m benchmarks.rollout [--out FILE] [--layers 4] [--skew 0] [--prompts 64] [--group 8]
        [--prompt-tokens 256] [--response-tokens 512] [--rounds 7] [--seeds] [name=value ...]

Contestants, all loaded at once, each given the same requests in every round:

- the trainer's `Generator` over a rollout engine, with capture of routes, and without;
- `LLM.generate` on the whole batch in a bare process, with the same engine arguments and capture,
  seeded as the trainer is (a seed per request on a CPU, none on a GPU); with ``--seeds`` the other
  way round, too.

The model is a slice of Qwen3-30B-A3B with random weights; ``--layers 0`` takes the tiny model of
the recipes. Responses end after a length drawn from half to three halves of ``--response-tokens``,
whatever was sampled. The first round of each is warm-up. ``name=value`` overrides a key of
+recipe=grpo_moe_r3.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.models import MODELS, random_slice
from benchmarks.result import Result, median_interval
from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import OVERRIDE_ON_ZERO
from rltrain.data.tiny_model import build_random_model
from rltrain.main import compose
from rltrain.rollout.engine import RolloutEngine, has_fp32_head
from rltrain.rollout.generator import Generator, build_batch, make_requests
from rltrain.rollout.launch import EngineSpec, RouteCapture, engine_args, environment, folder_config
from rltrain.rollout.requests import Request
from rltrain.rollout.route_store import store_here
from rltrain.routing.integrity import RouteShape
from rltrain.weights.families import read_architecture

ON_CUDA = [  # fixed sizes, so that three engines can start at once and none measures the others
    "rollout.enforce_eager=false",
    "rollout.gpu_memory_utilization=0.25",
    f"+rollout.engine_args.kv_cache_memory_bytes={12 * 2**30}",
]
ON_CPU = [  # where `LLM` takes more at once than `AsyncLLM` by default
    "+rollout.engine_args.max_num_seqs=256",
    "+rollout.engine_args.max_num_batched_tokens=4096",
]


@dataclass(frozen=True)
class Prompt:
    prompt_tokens: tuple[int, ...]
    id: str


@dataclass(frozen=True)
class Work:
    """What is generated: settings that the bare process gets, too."""

    path: str
    layers: int
    skew: float
    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int
    rounds: int
    seeds: bool
    overrides: list[str]

    @property
    def config(self) -> Config:
        longest = self.prompt_tokens + 2 * self.response_tokens
        return compose(
            [
                "+recipe=grpo_moe_r3",
                f"model.path={self.path}",
                f"trainer.prompts_per_step={self.prompts}",
                "trainer.mini_batches=1",
                f"algorithm.group_size={self.group}",
                f"data.max_prompt_tokens={self.prompt_tokens}",
                f"rollout.max_response_tokens={2 * self.response_tokens}",
                f"policy.max_tokens_per_micro_batch={max(longest, 4096)}",
                *(ON_CUDA if torch.cuda.is_available() else ON_CPU),
                *self.overrides,
            ]
        )

    def problems(self, round: int) -> list[Prompt]:
        draw = random.Random(round)
        vocab = folder_config(self.path)["vocab_size"]
        return [
            Prompt(
                tuple(draw.randrange(3, vocab) for _ in range(self.prompt_tokens)), f"{round}-{i}"
            )
            for i in range(self.prompts)
        ]

    @property
    def seeded(self) -> bool:
        """Whether the trainer's requests have a seed each."""
        return self.spec(capture=False).seeded

    def spec(self, capture: bool) -> EngineSpec:
        arch = read_architecture(Path(self.path))
        shape = RouteShape(
            arch.num_layers, arch.moe_layers, arch.num_experts, arch.experts_per_token
        )
        return EngineSpec(
            model_path=self.path,
            rollout=self.config.rollout,
            max_prompt_tokens=self.prompt_tokens,
            seed=0,
            device="cuda" if torch.cuda.is_available() else "cpu",
            capture=RouteCapture(shape, store_here()) if capture else None,
        )


def length(request: Request, mean: int) -> int:
    """Of the response, from half to three halves of ``mean``: the same wherever it is sampled."""
    return max(1, mean // 2 + request.seed % (mean + 1))


class FixedLengths(RolloutEngine):
    """Responses end where `length` says and nowhere else."""

    def __init__(self, spec: EngineSpec, mean: int) -> None:
        super().__init__(spec)
        self._mean = mean

    async def _add(self, name: str, request: Request, params: Any) -> Any:
        fix(params, request, self._mean)
        return await super()._add(name, request, params)


def fix(params: Any, request: Request, mean: int) -> None:
    params.max_tokens, params.ignore_eos, params.stop_token_ids = length(request, mean), True, []


# The bare process: a line in, a line out


def raw(work: Work) -> None:
    """Answer lines of JSON ``[round, seeded]`` with the seconds that `LLM.generate` takes."""
    spec = work.spec(capture=False)
    os.environ.update(environment(spec) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    capture = "enable_return_routed_experts"
    args = engine_args(spec, [*spec.rollout.engine_args], has_fp32_head=has_fp32_head())
    args[capture] = True
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    llm = LLM(**{name: value for name, value in args.items() if name in known})
    say("ready")
    for line in sys.stdin:
        round, seeded = json.loads(line)
        requests = requests_of(work, round)
        params = []
        for request in requests:
            given = SamplingParams(
                temperature=spec.rollout.temperature,
                seed=request.seed if seeded else None,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            fix(given, request, work.response_tokens)
            params.append(given)
        prompts = [{"prompt_token_ids": list(request.prompt_tokens)} for request in requests]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        say(time.perf_counter() - start)


def requests_of(work: Work, round: int) -> list[Request]:
    groups = make_requests(work.problems(round), work.group, 0, round)
    return [request for group in groups for request in group]


def say(what: object) -> None:
    sys.stdout.write(f"@{json.dumps(what)}\n")
    sys.stdout.flush()


class Bare:
    """The bare process, seen from outside."""

    def __init__(self, work: Work) -> None:
        command = [sys.executable, "-m", "benchmarks.rollout", "--raw"]
        command.append(json.dumps(dataclasses.asdict(work)))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, round: int, seeded: bool) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([round, seeded]) + "\n")
        self._process.stdin.flush()
        return float(self.answer())

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError("the bare process ended: its own error stands above")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# The run


def measure(work: Work) -> dict[str, list[float]]:
    """Tokens per second of every contestant, round by round."""
    os.environ.setdefault(OVERRIDE_ON_ZERO, "0")  # every actor sees the GPU
    ray.init(address="local", include_dashboard=False, logging_level="warning")
    specs = {"trainer": work.spec(capture=True), "trainer_without_capture": work.spec(False)}
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        actor = ray.remote(FixedLengths).options(num_cpus=0)
        engines = {name: actor.remote(spec, work.response_tokens) for name, spec in specs.items()}
        starting = {name: engine.start.remote() for name, engine in engines.items()}
        bare = stack.enter_context(closing(Bare(work)))
        for name, ready in starting.items():
            progress(f"{name} is ready: {ray.get(ready)}")
        progress(f"the bare process is {bare.answer()}")
        contestants: dict[str, Callable[[int], float]] = {
            **{name: trainer(work, engine) for name, engine in engines.items()},
            "raw": partial(bare.seconds, seeded=work.seeded),
        }
        if work.seeds:
            contestants[other_raw(work)] = partial(bare.seconds, seeded=not work.seeded)
        return {name: rates[1:] for name, rates in play(work, contestants).items()}


def other_raw(work: Work) -> str:
    return "raw_without_seeds" if work.seeded else "raw_with_seeds"


def trainer(work: Work, engine: Any) -> Callable[[int], float]:
    generator = Generator([engine], work.config)

    def seconds(round: int) -> float:
        problems = work.problems(round)
        start = time.perf_counter()
        groups = [group for group in generator.stream(problems, round) if group is not None]
        groups.sort(key=lambda group: group.index)
        build_batch([rollout for group in groups for rollout in group.rollouts], work.group)
        return time.perf_counter() - start

    return seconds


def play(work: Work, contestants: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Every round in another order, so that none always goes first."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for round in range(work.rounds + 1):
        tokens = sum(length(r, work.response_tokens) for r in requests_of(work, round))
        for name in names[round % len(names) :] + names[: round % len(names)]:
            rates[name].append(tokens / contestants[name](round))
            progress(f"round {round}: {name} {rates[name][-1]:,.0f} tokens/s")
    return rates


def progress(what: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {what}\n")


def report(work: Work, rates: dict[str, list[float]]) -> Result:
    settings = dataclasses.asdict(work)
    del settings["path"]
    result = Result("rollout", settings)
    for name, found in rates.items():
        result.measure(f"{name}_tokens_per_second", median_interval(found))

    def over(name: str, base: str, target: float | None) -> None:
        pairs = zip(rates[name], rates[base], strict=True)
        result.ratio(f"{name}_over_{base}", median_interval([a / b for a, b in pairs]), target)

    over("trainer", "raw", 0.97)
    over("trainer", "trainer_without_capture", 0.98)
    if work.seeds:
        over("raw", other_raw(work), None)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout")
    parser.add_argument("--raw")
    parser.add_argument("--out", type=Path)
    for name, default in (("layers", 4), ("prompts", 64), ("group", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--seeds", action="store_true")
    parser.add_argument("overrides", nargs="*")
    found = vars(parser.parse_args(arguments))
    given, out = found.pop("raw"), found.pop("out")
    if given:
        return raw(Work(**json.loads(given)))
    layers, skew = found["layers"], found["skew"]
    path = random_slice(MODELS, layers=layers, skew=skew) if layers else tiny_model()
    work = Work(path=str(path), **found)
    report(work, measure(work)).write(out)


def tiny_model() -> Path:
    return build_random_model(compose(["+recipe=grpo_moe_r3"]).model)


if __name__ == "__main__":
    main(sys.argv[1:])
