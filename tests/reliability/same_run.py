"""What of two runs that do the same is bitwise the same."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rltrain.tracking.jsonl import read_jsonl

TIMED = (
    *("time/", "throughput/", "memory/", "gpu/"),
    *("rollout/generate_seconds", "rollout/engines_busy_fraction", "rollout/batches_ready"),
)
"""Beginnings of the names of metrics that two runs that do the same need not agree on."""
MEASURED = (*TIMED, "rollout/weight_version", "checkpoint/pending")
"""Metrics that differ between such runs. A resumed one has new engines, which count syncs anew."""

OWN = ("state.json", "/.metadata")
"""Of a checkpoint, files that name its folder; the second also has an id of the save. It is the
index of the tensors' files, whose every byte is compared."""


def differences(straight: Path, other: Path, last: int) -> list[str]:
    """Of two run folders: what differs, a line each; empty where nothing does to step ``last``."""
    return [
        *row_differences(straight, other),
        *_lines(straight, other, "rollouts.jsonl"),
        *_lines(straight, other, "samples.jsonl"),
        *(line for step in range(1, last + 1) for line in _checkpoints(straight, other, step)),
    ]


def row_differences(
    straight: Path, other: Path, measured: tuple[str, ...] = MEASURED
) -> Iterator[str]:
    """Of the metrics of all steps.

    Args:
        measured: beginnings of the names of those that are not compared
    """
    rows = [read_jsonl(folder / "metrics.jsonl") for folder in (straight, other)]
    steps = [[row["step"] for row in of] for of in rows]
    if steps[0] != steps[1]:
        yield f"metrics.jsonl: rows of steps {steps[0]} and {steps[1]}"
        return
    for one, two in zip(*rows, strict=True):
        names = {name for name in one | two if not name.startswith(measured)}
        for name in sorted(names):
            if _bits(one.get(name)) != _bits(two.get(name)):
                yield f"step {one['step']}: {name} is {one.get(name)} and {two.get(name)}"


def _lines(straight: Path, other: Path, name: str) -> Iterator[str]:
    one, two = (read_jsonl(folder / name) for folder in (straight, other))
    if len(one) != len(two):
        yield f"{name}: {len(one)} and {len(two)} lines"
    for number, (a, b) in enumerate(zip(one, two, strict=False), start=1):
        if _bits(a) != _bits(b):
            yield f"{name}:{number}: {a} and {b}"[:400]


def _checkpoints(straight: Path, other: Path, step: int) -> Iterator[str]:
    """Hashes of all files of tensors, and all else that a checkpoint keeps."""
    folders = [folder / "checkpoints" / f"step_{step:06d}" for folder in (straight, other)]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        yield f"no {missing}"
        return
    files = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    hashes = [{n: e["sha256"] for n, e in of.items() if not n.endswith(OWN)} for of in files]
    for name in sorted(hashes[0] | hashes[1]):
        if hashes[0].get(name) != hashes[1].get(name):
            yield f"step {step}: {name} differs"
    kept = [_kept(folder) for folder in folders]
    for name in sorted(kept[0] | kept[1]):
        if _bits(kept[0].get(name)) != _bits(kept[1].get(name)):
            yield f"step {step}: state.json: {name} is {kept[0].get(name)} and {kept[1].get(name)}"


def _kept(folder: Path) -> Mapping[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    del state["config"]  # where a run is and how it goes on
    metrics = state.pop("metrics")
    return state | {n: v for n, v in metrics.items() if not n.startswith(MEASURED)}


def _bits(value: object) -> str:
    """Equal for equal bits: JSON writes the shortest text that names one double, and NaN."""
    return json.dumps(value, sort_keys=True)
