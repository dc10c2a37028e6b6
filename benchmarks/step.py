"""Where a whole GRPO step goes: a run of the main command, phase by phase.

    python -m benchmarks.step [--out FILE] [--layers 4] [--skew 0] [--steps 4] [--prompts 64]
        [--group 8] [--prompt-tokens 256] [--response-tokens 512] [name=value ...]

The model is a slice of Qwen3-30B-A3B with random weights; ``--layers 0`` takes the recipes' tiny
one, random too. A random model of 151,936 tokens almost never samples the one that ends a response.
So all have ``--response-tokens``; the mean length is measured. Rewards are random, so that
advantages and gradients are not zero. ``name=value`` overrides a key of +recipe=grpo_moe_r3.

The first step, with its sampled measurements and first uses, is left out.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MODELS, random_slice
from benchmarks.result import Interval, Result, median_interval
from rltrain.data.tiny_model import build_random_model
from rltrain.main import compose
from rltrain.tracking.jsonl import read_jsonl

COMPUTE = (
    *("generate", "old_logprobs", "native_logprobs", "ref_logprobs", "values"),
    *("critic_update", "update"),
)
"""Phases of generation, forward and backward, and the optimizer."""
TRANSFER = ("weight_sync", "engine_sleep", "engine_wake", "onload", "offload")

Row = Mapping[str, Any]


def lot(response: str, answer: object, **columns: object) -> float:
    """A reward that needs no sensible response."""
    return float(random.random() < 0.5)


def overrides(options: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """What the run is started with, before those of the command line."""
    longest = options.prompt_tokens + options.response_tokens
    return [
        "+recipe=grpo_moe_r3",
        f"model.path={model}",
        *("data=jsonl", f"data.path={prompts(options, folder)}", "data.eval_size=1"),
        f"data.max_prompt_tokens={options.prompt_tokens}",
        "data.reward.function=benchmarks.step.lot",
        f"trainer.steps={options.steps + 1}",
        f"trainer.output_dir={folder / 'run'}",
        f"trainer.prompts_per_step={options.prompts}",
        *("trainer.mini_batches=1", "trainer.eval_every=0", "trainer.invariants=warn"),
        *(
            "tracking=disabled",
            "checkpoint.every=0",
            "checkpoint.last=false",
            "routing_replay.sample_every=1000000",
        ),
        f"algorithm.group_size={options.group}",
        f"rollout.max_response_tokens={options.response_tokens}",
        f"policy.max_tokens_per_micro_batch={max(16384, longest)}",
        *(["rollout.enforce_eager=false"] if torch.cuda.is_available() else []),
        *options.overrides,
    ]


def prompts(options: argparse.Namespace, folder: Path) -> Path:
    """As many as a step takes, of digits: a byte is a token, and there is one before the first."""
    draw = random.Random(0)
    file = folder / "prompts.jsonl"
    texts = [
        "".join(draw.choices("0123456789", k=options.prompt_tokens - 1))
        for _ in range(options.prompts + 1)
    ]
    file.write_text("".join(json.dumps({"prompt": t, "answer": ""}) + "\n" for t in texts))
    return file


def report(steps: Sequence[Row], settings: dict[str, Any]) -> Result:
    """Of a run's rows from the second step on."""
    result = Result("step", settings)

    def of(number: Callable[[Row], float]) -> Interval:
        return median_interval([number(step) for step in steps])

    def share(phases: Sequence[str]) -> Interval:
        return of(lambda s: sum(s.get(f"time/{p}", 0.0) for p in phases) / s["time/step"])

    for name in dict.fromkeys(name for step in steps for name in step):
        if name.startswith("time/"):
            seconds = of(lambda s, name=name: s.get(name, 0.0))  # type: ignore[misc]
            result.measure(f"{name.removeprefix('time/')}_seconds", seconds)
    result.measure("tokens_per_second", of(lambda s: s["throughput/tokens_per_second"]))
    generated = of(lambda s: s["throughput/generated_tokens_per_second"])
    result.measure("generated_tokens_per_second", generated)
    result.measure("response_length_tokens", of(lambda s: s["rollout/response_length_mean"]))
    result.measure("coverage", min(s["routing/coverage"] for s in steps))
    phases = of(lambda s: 1 - s["time/other"] / s["time/step"])
    result.ratio("phases_over_step", phases, target=0.98)
    result.ratio("compute_and_transfer_over_step", share([*COMPUTE, *TRANSFER]), target=0.97)
    result.ratio("compute_over_step", share(COMPUTE))
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step")
    parser.add_argument("--out", type=Path)
    for name, default in (("layers", 4), ("steps", 4), ("prompts", 64), ("group", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    if options.layers:
        model = random_slice(MODELS, layers=options.layers, skew=options.skew)
    else:
        model = build_random_model(compose(["+recipe=grpo_moe_r3"]).model)
    with tempfile.TemporaryDirectory(prefix="rltrain-bench-") as folder:
        given = overrides(options, model, Path(folder))
        subprocess.run([sys.executable, "-m", "rltrain.main", *given], check=True)
        rows = read_jsonl(Path(folder) / "run" / "metrics.jsonl")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    report([row for row in rows if row["step"] > 1], settings).write(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
