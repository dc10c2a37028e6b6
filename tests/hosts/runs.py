"""The run of issue 19: R3 with policy pp=2 x ep=2 and two engines, over three hosts or on one."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rltrain.cli.app import main as rltrain
from rltrain.config.model import TinyModel
from tests.hosts.stage import Machine, Run, Stage
from tests.integration.conftest import OF_RL, SMALL
from tests.reliability.same_run import TIMED

TINY = TinyModel(num_layers=2, hidden_size=64, expert_size=64)
"""That of `SMALL`."""
LAYOUT = (
    "policy.parallel.pp=2",
    "policy.parallel.dp=2",
    "policy.parallel.ep=2",
    "rollout.num_engines=2",
)
"""Four ranks, two of each stage, and two engines: half of that on each of two hosts."""
SAME = ("rollout=deterministic", "policy.threads=1", "routing_replay.trace=true")
LEARNS = (
    "data.reward.function=tests.hosts.reward.score",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=0",
)
WIDE = (
    "trainer.steps=4",
    "model.tiny.num_layers=4",
    "model.tiny.hidden_size=128",
    "model.tiny.experts_per_token=8",
    "algorithm.group_size=16",
    "rollout.max_response_tokens=128",
    "trainer.mini_batches=2",
    "tracking.rollouts_every=1",
    "tracking.num_samples=1000000",
)
"""So much data that what is moved for its own sake counts little beside it."""
MEASURED = (*TIMED, "routing/bytes_", "weights/bytes_")
"""Begin the names of metrics that depend on the hosts."""


def arguments(
    stage: Stage, *overrides: str, layout: Sequence[str] = LAYOUT, across: bool = True
) -> list[str]:
    """Of ``python -m rltrain.main``.

    Args:
        across: over all hosts; else on the host of the command alone
    """
    where = [f"cluster.address={stage.address}"] if across else []
    models = f"model.cache_dir={stage.shared / 'models'}"
    chosen = (*SMALL, *OF_RL, *layout, *SAME, *LEARNS, models, "trainer.eval_every=0", *where)
    return ["+recipe=grpo_moe_r3", *chosen, *overrides]


def results(run: Run) -> dict[int, dict[str, Any]]:
    """By step, what two runs that do the same must agree on, to the last digit."""
    return {
        step: {name: value for name, value in row.items() if not name.startswith(MEASURED)}
        for step, row in run.metrics.items()
    }


def check_same(run: Run, reference: Run) -> None:
    """Losses, routes and weights: every metric of every step, and every bit of the weights.

    The traces have compared each router's choice with the engine's.
    """
    assert results(run) == results(reference)
    assert all(row["policy/grad_norm"] > 0 for row in run.metrics.values())
    weights, expected = final_weights(run.folder), final_weights(reference.folder)
    assert weights.keys() == expected.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a run whose folder this process can read, with its checkpoints there or behind a URL."""
    out = folder.with_name(f"{folder.name}-exported")
    if not out.exists():
        assert rltrain(["export", str(folder), str(out), "--trust"]) == 0
    return load_file(out / "model.safetensors")


def seconds_of(run: Run, steps: Sequence[int]) -> float:
    return float(sum(run.metrics[step]["time/step"] for step in steps))


def check_ended(made: Stage, hosts: Sequence[Machine] | None = None, limit_s: float = 10.0) -> None:
    """Nothing of a run is left on these hosts, by default all; Ray's own processes stay."""
    end = time.monotonic() + limit_s
    while left := {
        machine.name: lines
        for machine in hosts or made.hosts
        if (lines := [line for line in machine.processes().values() if _is_of_run(line)])
    }:
        assert time.monotonic() < end, f"still there after {limit_s:g} s: {left}"
        time.sleep(0.5)


def _is_of_run(line: str) -> bool:
    """By its command line. Ray's agents are named ``ray::``, too, and idle workers wait."""
    of_ray = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE")
    return "rltrain.main" in line or ("ray::" in line and not line.startswith(of_ray))
