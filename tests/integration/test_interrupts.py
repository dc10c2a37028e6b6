"""Ctrl-C and SIGTERM of real runs, with engines: what is said, what is left, and what is not."""

import json
import signal
import time
from typing import Any

import psutil
import pytest
import torch

from rltrain.controller.run_checkpoint import checkpoints, step_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]


SLOW = ["trainer.grace_s=300"]
"""Machines are busy."""


@pytest.mark.parametrize("wait_s", [0.0, 0.7, 1.4])
def test_sigterm_of_a_run_with_engines(start: Any, wait_s: float) -> None:
    """It comes while the run waits for Ray, which then raises a KeyboardInterrupt of its own: while
    the engines generate or the policy learns. What was learned is saved."""
    run = start("terminated", "trainer.steps=1000", "checkpoint.every=1000", *SLOW)
    while 1 not in run.metrics and run.process.poll() is None:
        time.sleep(0.2)
    time.sleep(wait_s)
    running = run.interrupt(signal.SIGTERM)
    run.wait(expect=143)
    assert psutil.wait_procs(running, timeout=30)[1] == []
    outcome = json.loads((run.folder / "outcome.json").read_text())
    assert (outcome["state"], outcome["error"]) == ("interrupted", "SIGTERM")
    assert outcome["step"] == max(run.metrics)
    said = f"rltrain: interrupted at step {max(run.metrics)}"
    assert said in run.output and "Traceback" not in run.output
    saved = step_of(checkpoints(run.folder)[-1])
    assert saved - max(run.metrics) in (0, 1)
    assert "The run was interrupted at step" in (run.folder / "report.html").read_text()


@pytest.mark.parametrize("wait_s", [0.0, 0.5])
def test_ctrl_c_twice_while_engines_start(start: Any, wait_s: float) -> None:
    """The second one comes at once, or while Ray is being closed."""
    run = start("twice", "trainer.steps=1000")
    while not (run.folder / "logs" / "engine-0.log").exists() and run.process.poll() is None:
        time.sleep(0.2)
    running = run.interrupt()
    time.sleep(wait_s)
    running += run.interrupt()
    run.wait(expect=130)
    assert psutil.wait_procs(running, timeout=30)[1] == []
    assert "Traceback" not in run.output
    outcome = json.loads((run.folder / "outcome.json").read_text())
    assert outcome["state"] == "interrupted"
