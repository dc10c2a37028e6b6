"""A real run of two steps in a process of its own: it generates, replays, updates and syncs.

The second step generates with the weights that the first one made, so a sync that lost them shows
in the distance between engine and trainer. The model is tiny and untrained, and both sides compute
in float32 on a CPU: what is right agrees to rounding.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rltrain.config import Config
from rltrain.controller.doctor.findings import Finding, fail, ok, warn
from rltrain.planning.machine import device
from rltrain.tracking.jsonl import read_jsonl

LIMIT_S = 600.0
EXPECTED_S = 30.0
LARGEST_K3 = {"cpu": 1e-6, "cuda": 5e-3}
"""Without faults it is 3e-14 (float32) and up to 5e-4 (bf16, an untrained model); with weights that
are one step old it is 4e-2."""
SMALL = (
    "+recipe=grpo_moe_r3",
    "model.tiny.num_layers=2",
    "model.tiny.hidden_size=64",
    "model.tiny.expert_size=64",
    "model.tiny.warm_start.steps=0",
    "data.size=64",
    "data.eval_size=0",
    f"data.reward.function={__name__}.reward_by_length",
    "algorithm.group_size=4",
    "trainer.prompts_per_step=8",
    "trainer.mini_batches=2",
    "trainer.steps=2",
    "optimizer.lr=1e-2",
    "optimizer.warmup_steps=0",
    "checkpoint.last=false",
    "tracking.backends=[]",
)
BY_DEVICE = {"cpu": ("rollout.dtype=float32",), "cuda": ()}


@dataclass(frozen=True)
class Trial:
    """What a self-test's run left."""

    status: int
    seconds: float
    rows: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl, one a step."""
    invariants: Sequence[Mapping[str, str]]
    last_words: str
    """The end of what it wrote to the terminal."""


def reward_by_length(response: str, answer: str, **columns: object) -> float:
    """A reward that differs between the responses of an untrained model."""
    return float(len(response))


def self_test(overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Train for two steps; one finding for each thing that must hold.

    Args:
        overrides: after the self-test's own, e.g. ``cluster.device=cpu``
    """
    where = device(Config().cluster)
    with tempfile.TemporaryDirectory(prefix="rltrain-doctor-") as folder:
        trial = run_trial(Path(folder), [*BY_DEVICE[where], *overrides])
    yield from judge(trial, where)


def run_trial(folder: Path, overrides: Iterable[str]) -> Trial:
    run = folder / "run"
    command = [sys.executable, "-W", "ignore", "-m", "rltrain.main", *SMALL, *overrides]
    command += [f"model.cache_dir={folder}/cache", f"trainer.output_dir={run}"]
    began = time.monotonic()
    with (folder / "output.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=folder
        )
        try:
            status = process.wait(LIMIT_S)
        except BaseException:  # also Ctrl-C: the run ends its engines and workers on SIGTERM
            process.terminate()
            process.wait()
            raise
        log.seek(0)
        said = log.read().strip().splitlines()
    metrics, invariants = run / "metrics.jsonl", run / "invariants.json"
    return Trial(
        status,
        time.monotonic() - began,
        [row for row in read_jsonl(metrics) if row["step"] > 0] if metrics.is_file() else [],
        json.loads(invariants.read_text())["checks"] if invariants.is_file() else [],
        " ".join(line.strip() for line in said[-4:]),
    )


def judge(trial: Trial, where: Literal["cpu", "cuda"]) -> Iterator[Finding]:
    """What must hold of a run of two steps. Pure."""
    if trial.status != 0 or len(trial.rows) != 2:
        yield fail(
            "self-test: run",
            f"it ended with status {trial.status} after {len(trial.rows)} of 2 steps: "
            f"{trial.last_words}",
            "see the message; rltrain doctor without --self-test checks what a run needs",
        )
        return
    yield _speed(trial.seconds)
    first, second = trial.rows
    coverage = [row.get("routing/coverage") for row in trial.rows]
    yield _holds(
        "routes",
        coverage == [1.0, 1.0],
        f"coverage {coverage[0]} and {coverage[1]}; expected 1.0",
        "the engine lost routes: install a tested vLLM (docs/install.md)",
    )
    failed = [check["name"] for check in trial.invariants if check["state"] == "fail"]
    passed = [check["name"] for check in trial.invariants if check["state"] == "pass"]
    yield _holds(
        "first step",
        not failed and "trainer and engine agree" in passed,
        f"{len(passed)} invariants hold" if not failed else f"broken: {', '.join(failed)}",
        "the trainer does not compute what the engine does: install tested versions",
    )
    ratios = [row.get("policy/ratio_max", 1.0) for row in trial.rows]
    yield _holds(
        "update",
        min(ratios) > 1.0001 and all(row.get("policy/grad_norm", 0) > 0 for row in trial.rows),
        f"after an update the largest probability ratio is {ratios[0]:.4g} and {ratios[1]:.4g}; "
        "expected other than 1",
        "the optimizer did not change the weights: install tested versions",
    )
    k3, bound = second.get("mismatch/k3", float("inf")), LARGEST_K3[where]
    versions = [row.get("rollout/weight_version") for row in (first, second)]
    yield _holds(
        "weight sync",
        versions == [1, 2] and k3 <= bound,
        f"k3 with synced weights {k3:.1g}; expected at most {bound:g}; weight versions {versions}",
        "the engine does not have the trainer's weights: install a tested vLLM",
    )


def _holds(name: str, holds: bool, found: str, remedy: str) -> Finding:
    check = f"self-test: {name}"
    return ok(check, found) if holds else fail(check, found, remedy)


def _speed(seconds: float) -> Finding:
    found = f"two steps in {seconds:.0f} s, start included"
    if seconds > 4 * EXPECTED_S:
        return warn(
            "self-test: run",
            f"{found}; {EXPECTED_S:.0f} to {2 * EXPECTED_S:.0f} s are usual",
            "end other programs; on 2 cores the start of engine and workers takes most of it",
        )
    return ok("self-test: run", found)
