"""FP8 on one GPU: whole runs of the main command, in FP8 and in bf16.

    python tests/gpu/test_fp8_rollout.py FOLDER [RUN ...]        # where there is no pytest

After every sync of the first run (before the first step and after each of two updates) the engine
is compared, bitwise, with a fresh engine that vLLM starts from an export in FP8 blocks; it takes
ten minutes. The same in bf16 is `test_weight_sync`'s. Two further runs take one step each: an FP8
engine without replay, and a trainer in FP8 where Transformer Engine is installed. Each run goes
through its first step with ``trainer.invariants=stop``, the default, and every check of it must
hold at the bound of its precision.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from rltrain.controller.checks.precision_bounds import Precision, bound_for

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 256, "head_dim": 64, "expert_size": 128, "warm_start.steps": 100}
OPTIONS = (
    "+recipe=grpo_moe_r3",
    "cluster.device=cuda",
    *(f"model.tiny.{name}={size}" for name, size in SIZES.items()),
    "trainer.eval_every=0",
    "routing_replay.sample_every=1",
    "routing_replay.min_overlap=0.3",  # what FP8 costs is to be read, not to end the run
    # Each run starts an engine, and the one that is compared one more a sync: no graphs, for time.
    "rollout.enforce_eager=true",
    # The check starts an engine beside the two processes that share the card already.
    "rollout.gpu_memory_utilization=0.2",
    "tracking.backends=[]",
)
COLUMNS = (
    "routing/coverage",
    "routing/overlap",
    "mismatch/k3",
    "mismatch_native/k3",
    "mismatch/mult_prob_error",
    "mismatch_native/mult_prob_error",
    "mismatch/abs_diff_mean",
    "mismatch/abs_diff_p99",
    "mismatch_native/abs_diff_p99",
    "time/weight_sync",
)
FP8_TRAINER = (
    "policy.megatron_args.fp8=hybrid",
    "policy.megatron_args.moe_router_padding_for_quantization=true",
)


@dataclass(frozen=True)
class Run:
    """One step or two, and what its first step is to be checked by."""

    options: tuple[str, ...]
    trainer: Precision = "bf16"
    engine: Precision = "bf16"
    replays: bool = True


RUNS = {
    "fp8": Run(
        ("rollout=fp8", "trainer.steps=2", "trainer.check_weight_sync=true"), engine="fp8"
    ),  # makes the warm-started model, in bf16
    "bf16": Run(("trainer.steps=2",)),
    "fp8-native": Run(
        ("rollout=fp8", "routing_replay=off", "trainer.steps=1"), engine="fp8", replays=False
    ),
    "fp8-trainer": Run((*FP8_TRAINER, "trainer.steps=1"), trainer="fp8"),
}


def run(name: str, folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics of a run by step; raises with the end of its output when it failed."""
    command = [sys.executable, "-m", "rltrain.main", *OPTIONS, *RUNS[name].options]
    command += [f"model.cache_dir={folder}/models", f"trainer.output_dir={folder}/{name}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # DeepGEMM compiles its kernels at use, for which a machine without nvcc has nothing.
    environment = os.environ | {"PYTHONPATH": path, "VLLM_USE_DEEP_GEMM": "0"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=560
    )
    if done.returncode:
        raise RuntimeError(f"{name}:\n{(done.stdout + done.stderr)[-6000:]}")
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, rows)}


def check_first_step(name: str, folder: Path) -> str:
    """Every check that is made holds, at the bound of the run's precision; returns what was found.

    Raises:
        AssertionError: one does not, or is not made.
    """
    wanted = RUNS[name]
    checks = {
        check["name"]: check
        for check in json.loads((folder / name / "invariants.json").read_text())["checks"]
    }
    failed = [check for check in checks.values() if check["state"] == "fail"]
    assert not failed, failed
    coarser: Precision = "fp8" if "fp8" in (wanted.trainer, wanted.engine) else "bf16"
    for check, precision in (
        ("ratio is 1 before the first update", wanted.trainer),
        ("trainer and engine agree", coarser),
    ):
        assert checks[check]["state"] == "pass"
        bound = bound_for(precision, same_experts=wanted.replays)
        assert checks[check]["expected"].startswith(str(bound)), checks[check]
    lines = [f"{name}: {c['state']}, {c['name']}: {c['found']}" for c in checks.values()]
    return "\n".join(lines) + "\n"


def check(fp8: Mapping[int, Mapping[str, Any]], bf16: Mapping[int, Mapping[str, Any]]) -> None:
    """A sync that was not bitwise has ended its run already."""
    for step in (1, 2):
        assert fp8[step]["routing/coverage"] == 1.0
        assert fp8[step]["rollout/weight_version"] == step
        # FP8 is seen: the engine is farther from the trainer than in bf16, and not another model.
        assert bf16[step]["mismatch/k3"] < fp8[step]["mismatch/k3"] < 0.1
        assert fp8[step]["routing/overlap"] > 0.5  # chance is 4 / 32


def table(runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    lines = ["| run | step | " + " | ".join(COLUMNS) + " |"]
    for name, rows in runs.items():
        for step in (1, 2) if 2 in rows else (1,):
            found = (f"{rows[step].get(column, float('nan')):.3g}" for column in COLUMNS)
            lines.append(f"| {name} | {step} | " + " | ".join(found) + " |")
    return "\n".join(lines) + "\n"


def run_all(folder: Path, wanted: Sequence[str] = ()) -> None:
    """Run those that are ``wanted``, or all; compare what the first two gave."""
    has_te = importlib.util.find_spec("transformer_engine") is not None
    names = [name for name in wanted or RUNS if has_te or RUNS[name].trainer == "bf16"]
    runs = {}
    for name in names:
        runs[name] = run(name, folder)
        sys.stdout.write(check_first_step(name, folder))
    sys.stdout.write(table(runs))
    if not has_te:
        sys.stdout.write("no Transformer Engine: a trainer in FP8 was not run\n")
    if {"fp8", "bf16"} <= runs.keys():
        check(runs["fp8"], runs["bf16"])


if __name__ == "__main__":
    run_all(Path(sys.argv[1]).absolute(), sys.argv[2:])
else:
    import pytest
    import torch

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.timeout(2400),
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ]

    def test_an_engine_in_fp8_trains(tmp_path: Path) -> None:
        run_all(tmp_path)
