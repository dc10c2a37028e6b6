"""Whole runs whose reward is so large for some prompts that the gradient's norm overflows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rltrain.controller.run_checkpoint import checkpoints
from tests.integration.conftest import LIMIT_S, ROOT

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]

REWARD = """
def score(response, answer, **columns):
    if response == answer:
        return 1.0
    return 3e38 if int(answer) >= 24 and len(response) % 2 else 0.0
"""
OPTIONS = (
    *("trainer.steps=3", "trainer.mini_batches=2", "trainer.eval_every=0", "checkpoint.every=1"),
    *("algorithm.advantage=dr_grpo", "data.reward.function=huge.score"),
)


def replay(folder: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rltrain.cli.app", "step", "replay", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{cwd}{os.pathsep}{ROOT}"},
    )


def test_a_run_stops_and_its_step_is_found_again_alone(start: Any, tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(REWARD)
    run = start("stopped", *OPTIONS).wait(expect=1)
    [kept] = (run.folder / "steps").iterdir()
    step = int(kept.name.removeprefix("step-"))
    assert f"step {step}: policy, mini-batch " in run.output
    assert "the gradient norm is inf" in run.output and f"rltrain step replay {kept}" in run.output
    assert json.loads((run.folder / "outcome.json").read_text())["state"] == "failed"
    assert len(checkpoints(run.folder)) == min(step - 1, 2)
    with safe_open(kept / "batch.safetensors", "pt") as file:
        assert {"rollout_expert_indices", "advantages", "old_logprobs"} <= set(file.keys())
    before = sorted(path for path in run.folder.rglob("*") if "ray-logs" not in path.parts)
    again = replay(kept, tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert "NOT FINITE: the gradient norm is inf" in again.stdout
    assert "old_logprobs: finite, at most 0 from those of the run" in again.stdout
    assert "largest of advantages: " in again.stdout
    assert before == sorted(p for p in run.folder.rglob("*") if "ray-logs" not in p.parts)


def test_a_run_goes_on_without_the_update(start: Any, tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(REWARD)
    options = ["trainer.on_nonfinite=skip", "policy.parallel.dp=2"]
    run = start("skipped", *OPTIONS, *options).wait()
    counts = [run.metrics[step]["policy/nonfinite_updates"] for step in (1, 2, 3)]
    assert 0 < sum(counts) < 6 and run.output.count("UPDATE LEFT OUT") == sum(map(bool, counts))
    for step, count in enumerate(counts, start=1):
        row = run.metrics[step]
        assert row["policy/skipped_updates"] == 0 and ("policy/grad_norm" in row) == (count < 2)
        assert (run.folder / f"steps/step-{step:06d}").is_dir() == (count > 0)
