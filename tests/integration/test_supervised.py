"""Supervised runs through the entry point: the loop of GRPO with supervised steps.

Not exercised: several ranks, which tests/distributed compares with one.
"""

import json
import shlex
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rltrain.cli.app import main as rltrain
from rltrain.config.saved_config import load_config
from rltrain.controller import run_checkpoint as checkpoint
from rltrain.data.problems import problems_of
from rltrain.data.targets import with_targets
from rltrain.data.tokenizer import tiny_tokenizer
from tests.integration.test_run import timeless

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]

OPTIONS = (
    "trainer.mini_batches=2",
    "trainer.grace_s=300",
    "checkpoint.every=3",
    "trainer.eval_every=2",
)
# The rate of an update tells how many came before it.
OPTIONS += ("optimizer.warmup_steps=1000", "optimizer.lr=0.1", "algorithm.aggregation=constant")


def test_an_interrupted_run_goes_on_bitwise_and_a_finished_one_is_left_alone(
    start: Any, tmp_path: Path
) -> None:
    stopped = start("stopped", "trainer.steps=100000", *OPTIONS, recipe="sft_tiny")
    while 4 not in stopped.metrics and stopped.process.poll() is None:
        time.sleep(0.1)
    running = stopped.interrupt()
    stopped.wait(expect=130)
    assert psutil.wait_procs(running, timeout=20)[1] == []
    before = stopped.metrics
    saved = checkpoint.step_of(checkpoint.checkpoints(stopped.folder)[-1])
    outcome = json.loads((stopped.folder / "outcome.json").read_text())
    assert (outcome["state"], outcome["step"]) == ("interrupted", max(before))
    assert saved - max(before) in (0, 1)  # it was saved, also where no checkpoint was due
    assert f"rltrain: interrupted at step {max(before)}" in stopped.output
    assert "Traceback" not in stopped.output
    *_, typed = stopped.output.partition("; resume with\n")
    steps = f"trainer.steps={saved + 3}"  # the last one is no multiple of what is due every 2
    straight = start("straight", steps, *OPTIONS, recipe="sft_tiny")
    resumed = start("stopped", steps, typed=shlex.split(typed)).wait()
    straight.wait()
    assert f"resumed after step {saved}" in resumed.output
    assert sorted(resumed.metrics) == sorted(straight.metrics) == list(range(saved + 4))
    for step, row in straight.metrics.items():
        assert timeless(resumed.metrics[step]) == timeless(row)
        if step in before:
            assert timeless(before[step]) == timeless(row)
        assert ("eval/loss" in row) == (step % 2 == 0 or step == saved + 3)
        if step:
            assert row["policy/lr"] == pytest.approx(0.1 * 2 * step / 1000)
            assert row["policy/skipped_updates"] == 0
    weights = [load_file(run.folder / "model/model.safetensors") for run in (straight, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    last = straight.folder / "checkpoints" / "last"
    assert rltrain(["export", str(last), str(tmp_path / "last")]) == 0
    exported = load_file(tmp_path / "last" / "model.safetensors")
    assert all(torch.equal(exported[name], weights[0][name]) for name in weights[0])
    checks = json.loads((straight.folder / "invariants.json").read_text())["checks"]
    assert {check["state"] for check in checks} == {"pass"}

    last = straight.metrics[saved + 3]["eval/loss"]
    assert last == pytest.approx(held_out_loss(straight.folder), rel=1e-4)
    assert last < straight.metrics[0]["eval/loss"] - 0.1  # it learns

    written = (straight.folder / "model/model.safetensors").stat().st_mtime_ns
    again = start("straight", steps, "trainer.resume=auto", *OPTIONS, recipe="sft_tiny").wait()
    assert f"is finished, after step {saved + 3}" in again.output
    assert (straight.folder / "model/model.safetensors").stat().st_mtime_ns == written


def held_out_loss(folder: Path) -> float:
    """By transformers, one sequence at a time, of the model that the run left."""
    config, tokenizer = load_config(folder), tiny_tokenizer()
    held_out = problems_of(config, tokenizer).held_out
    assert len(held_out) == 32
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    total, count = 0.0, 0
    for problem in with_targets(held_out, tokenizer, config.data, 16):
        prompt, target = problem.prompt_tokens, problem.target_tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *target]])).logits[0].double()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        total -= float(logprobs[range(len(target)), target].sum())
        count += len(target)
    return total / count
