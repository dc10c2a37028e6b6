"""FP8 rollout weights on one GPU: two whole runs of the main command, in FP8 and in bf16.

    python tests/gpu/test_fp8_rollout.py FOLDER        # where there is no pytest

After every sync (before the first step and after each of two updates) the engine is compared,
bitwise, with a fresh engine that vLLM starts from an export in FP8 blocks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 256, "head_dim": 64, "expert_size": 128, "warm_start.steps": 100}
OPTIONS = (
    "+recipe=grpo_moe_r3",
    "cluster.device=cuda",
    *(f"model.tiny.{name}={size}" for name, size in SIZES.items()),
    "trainer.steps=2",
    "trainer.check_weight_sync=true",
    "trainer.eval_every=0",
    "routing_replay.sample_every=1",
    "routing_replay.min_overlap=0.3",  # what FP8 costs is to be read, not to end the run
    # The check starts an engine beside the two processes that share the card already.
    "rollout.gpu_memory_utilization=0.2",
    "tracking.wandb=disabled",
)
COLUMNS = (
    "routing/coverage",
    "routing/overlap",
    "mismatch/k3",
    "mismatch_native/k3",
    "mismatch/mult_prob_error",
    "mismatch_native/mult_prob_error",
    "time/weight_sync",
)


def run(quantization: str, folder: Path) -> dict[int, dict[str, Any]]:
    """The metrics of a run by step; raises with the end of its output when it failed."""
    command = [sys.executable, "-m", "rltrain.main", *OPTIONS]
    command += [f"rollout.quantization={quantization}", f"model.cache_dir={folder}/models"]
    command += [f"trainer.output_dir={folder}/{quantization}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # DeepGEMM compiles its kernels at use, for which a machine without nvcc has nothing.
    environment = os.environ | {"PYTHONPATH": path, "VLLM_USE_DEEP_GEMM": "0"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=560
    )
    if done.returncode:
        raise RuntimeError(f"{quantization}:\n{(done.stdout + done.stderr)[-6000:]}")
    rows = (folder / quantization / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, rows)}


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
        for step in (1, 2):
            found = (f"{rows[step].get(column, float('nan')):.3g}" for column in COLUMNS)
            lines.append(f"| {name} | {step} | " + " | ".join(found) + " |")
    return "\n".join(lines) + "\n"


def run_both(folder: Path) -> None:
    runs = {name: run(name, folder) for name in ("fp8", "none")}
    sys.stdout.write(table(runs))
    check(runs["fp8"], runs["none"])


if __name__ == "__main__":
    run_both(Path(sys.argv[1]).absolute())
else:
    import pytest
    import torch

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.timeout(1200),
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ]

    def test_an_engine_in_fp8_trains(tmp_path: Path) -> None:
        run_both(tmp_path)
