"""What the trainer costs on top of its engines, measured in one run.

    python -m benchmarks.throughput [name=value ...]      overrides of +recipe=grpo_moe_r3

Two processes, one after the other, on the same model, prompts, engine arguments and sampling:

- raw vLLM: ``LLM.generate`` on a step's whole batch, warmed up;
- the trainer: a few steps of the recipe.

Prints generated tokens per second of both and their ratio, and the share of step time spent in
neither generation, forward and backward, nor the optimizer. The first round of both is warm-up.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rltrain.config import Config
from rltrain.tracking.jsonl import read_jsonl

STEPS = 8
COMPUTE = (
    "time/generate",
    "time/old_logprobs",
    "time/native_logprobs",
    "time/ref_logprobs",
    "time/update",
)


def main(overrides: list[str]) -> None:
    if overrides[:1] == ["--raw"]:
        return raw(Path(overrides[1]))
    run_dir = Path(tempfile.mkdtemp(prefix="rltrain-bench-")) / "run"
    command = [
        sys.executable,
        "-m",
        "rltrain.main",
        "+recipe=grpo_moe_r3",
        f"trainer.steps={STEPS}",
    ]
    command += [f"trainer.output_dir={run_dir}", "trainer.eval_every=0", "tracking=disabled"]
    # Sampled measurements are not part of an ordinary step.
    command += ["routing_replay.sample_every=1000000", *overrides]
    subprocess.run(command, check=True)
    steps = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["step"] > 1]
    child = [sys.executable, "-m", "benchmarks.throughput", "--raw", str(run_dir)]
    raw_rounds = json.loads(
        subprocess.run(child, check=True, capture_output=True).stdout.splitlines()[-1]
    )
    report(steps, raw_rounds)


def report(steps: list[dict[str, Any]], raw_rounds: list[float]) -> None:
    trainer = statistics.median(s["throughput/generated_tokens_per_second"] for s in steps)
    ceiling = statistics.median(raw_rounds[1:])
    shares = {
        name: statistics.median(s.get(name, 0.0) / s["time/step"] for s in steps)
        for name in sorted({n for s in steps for n in s if n.startswith("time/")} - {"time/step"})
    }
    rest = statistics.median(
        1 - sum(s.get(n, 0.0) for n in COMPUTE) / s["time/step"] for s in steps
    )
    result = {
        "rollout_tokens_per_second": round(trainer, 1),
        "raw_vllm_tokens_per_second": round(ceiling, 1),
        "rollout_over_raw": round(trainer / ceiling, 3),
        "step_seconds": round(statistics.median(s["time/step"] for s in steps), 3),
        "share_of_step": {name: round(value, 4) for name, value in shares.items()},
        "share_in_neither_generation_nor_compute": round(rest, 4),
        "cores": os.cpu_count(),
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def raw(run_dir: Path) -> None:
    """Tokens per second of `LLM.generate` on the first steps' requests of a run, by round."""
    from rltrain.config.files import load
    from rltrain.rollout.engine import has_fp32_head
    from rltrain.rollout.launch import engine_args, environment

    config = load(run_dir)
    requests, spec, stop = _requests(config)
    os.environ.update(environment(spec), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    capture = "enable_return_routed_experts"
    args = engine_args(spec, [capture], has_fp32_head=has_fp32_head())
    args[capture] = config.routing_replay.capture
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    llm = LLM(**{name: value for name, value in args.items() if name in known})
    rounds = []
    for batch in requests:
        params = [
            SamplingParams(
                temperature=config.rollout.temperature,
                max_tokens=config.rollout.max_response_tokens,
                seed=request.seed,
                logprobs=0,
                stop_token_ids=stop,
                detokenize=False,
            )
            for request in batch
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_tokens)} for request in batch]
        llm.reset_prefix_cache()  # so does the trainer, with every weight sync
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        rounds.append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    sys.stdout.write(json.dumps(rounds) + "\n")


def _requests(config: Config) -> tuple[Any, ...]:
    from transformers import AutoTokenizer

    from rltrain.data.loader import PromptLoader
    from rltrain.data.problems import load_problems
    from rltrain.data.tiny_model import warm_started_path
    from rltrain.rollout.generator import make_requests
    from rltrain.rollout.launch import EngineSpec, stop_token_ids

    path = (
        Path(config.model.path) if config.model.path else warm_started_path(config.model) / "model"
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    problems = load_problems(config.data, tokenizer, config.model.tiny.warm_start.num_problems)
    loader = PromptLoader(problems.train, config.trainer.prompts_per_step, config.trainer.seed)
    steps = [
        [
            request
            for group in make_requests(
                next(loader), config.algorithm.group_size, config.trainer.seed, step
            )
            for request in group
        ]
        for step in range(1, STEPS + 1)
    ]
    import torch

    device = "cuda" if torch.cuda.is_available() and config.cluster.device != "cpu" else "cpu"
    spec = EngineSpec(
        model_path=str(path),
        rollout=config.rollout,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.trainer.seed,
        device=device,
        capture=None,
    )
    return steps, spec, stop_token_ids(str(path))


if __name__ == "__main__":
    main(sys.argv[1:])
