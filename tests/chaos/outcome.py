"""What became of a run, beside one that nothing happened to."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from rltrain.cli.app import main as rltrain
from rltrain.tracking.jsonl import read_jsonl
from tests.reliability.same_run import TIMED, row_differences

MEASURED = (*TIMED, "rollout/weight_version", "rollout/engine_restarts")
"""Beginnings of the names of metrics that a run with faults need not share with one without."""
LEVEL = re.compile(r"^(?:\S+ \S+ )?(?:ERROR|WARNING|rltrain:) ?")
PREFLIGHT = "WARNING data.reward.function="
"""Of the reward of these runs, which rewards no right answer: each start says so."""
WENT_ON = re.compile(r"from the checkpoint of step \d+|resumed after step \d+")


def what_was_said(text: str) -> str:
    """The first error or warning of a run's output, and where the run went on from."""
    said, went_on = "", ""
    for line in text.splitlines():
        if not said and PREFLIGHT not in line and (level := LEVEL.match(line)):
            said = line[level.end() :].strip()
        if found := WENT_ON.search(line):
            went_on = found[0]
    return "; ".join(part for part in (said, went_on) if part)


def seconds_of_phases(run: Path) -> dict[str, float]:
    """Of every phase: of the median step."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["step"] > 1]
    names = {name for row in rows for name in row if name.startswith("time/")}
    return {
        name.removeprefix("time/"): sorted(row.get(name, 0.0) for row in rows)[len(rows) // 2]
        for name in names
    }


def is_same(run: Path, undisturbed: Path, work: Path) -> bool:
    """Whether all metrics of all steps and all final weights agree to the last bit.

    Args:
        work: a folder for exports
    """
    weights = [_weights(folder, work) for folder in (run, undisturbed)]
    return (
        not list(row_differences(undisturbed, run, MEASURED))
        and weights[0].keys() == weights[1].keys()
        and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    )


def _weights(run: Path, work: Path) -> dict[str, torch.Tensor]:
    out = work / f"export-of-{run.parent.name}"
    if not out.exists():
        assert rltrain(["export", str(run), str(out)]) == 0, f"no weights in {run}"
    return load_file(out / "model.safetensors")
