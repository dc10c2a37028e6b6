"""The files of a run's folder as plain data.

Any of them may be missing, as after an early death.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rltrain.tracking.gpus import GpuSample, read_gpus
from rltrain.tracking.jsonl import read_jsonl

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """What a run left behind.

    ``rows`` and ``samples`` are in the order of their steps, and a step has one row. ``command`` is
    the line that started the run. ``notes`` are sentences about what was missing or left out.
    """

    path: Path
    rows: list[Row]
    samples: list[Row]
    config: Mapping[str, Any]
    command: str
    versions: Mapping[str, Any]
    outcome: Mapping[str, Any]
    invariants: Mapping[str, Any]
    recipe: Mapping[str, Any]
    gpus: list[GpuSample]
    notes: list[str]


def read_run(path: Path) -> RunFolder:
    """Read the folder of a run.

    Raises:
        ValueError: when there is no such folder, or a file in it cannot be read.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path} is no run folder: expected a folder with metrics.jsonl in it [RL7001]"
        )
    config, command = _read_config(path / "config.yaml")
    versions = _read_json(path / "versions.json")
    rows, notes = numeric_rows(read_jsonl(path / "metrics.jsonl"))
    for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
        if _is_torn(path / name):
            notes.append(
                f"The last line of {name} was cut off while it was written. It is left out."
            )
    if versions.get("resumed_after_steps"):
        notes.append(f"The run was resumed after step {versions['resumed_after_steps']}.")
    return RunFolder(
        path=path,
        rows=rows,
        samples=sorted(read_jsonl(path / "samples.jsonl"), key=lambda row: row["step"]),
        config=config,
        command=command,
        versions=versions,
        outcome=_read_json(path / "outcome.json"),
        invariants=_read_json(path / "invariants.json"),
        recipe=_read_json(path / "recipe.json"),
        gpus=read_gpus(path / "gpus.csv"),
        notes=notes,
    )


def numeric_rows(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """One row per step in the order of steps, a value being a finite float or None; and notes.

    Of two rows of one step the later one counts: a resumed run wrote it. What is no number is left
    out.
    """
    by_step = {row["step"]: row for row in rows}
    notes = []
    if len(by_step) < len(rows):
        repeated = len(rows) - len(by_step)
        notes.append(f"{repeated} steps were logged more than once. The last line of each counts.")
    clean, not_finite, no_numbers = [], dict[str, list[int]](), set[str]()
    for step in sorted(by_step):
        numbers: Row = {"step": step}
        for name, value in by_step[step].items():
            if name == "step":
                continue
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                numbers[name] = None
                not_finite.setdefault(name, []).append(step)
            elif isinstance(value, int | float):
                numbers[name] = float(value)
            else:
                no_numbers.add(name)
        clean.append(numbers)
    notes += [
        f"{name} was not finite in {len(steps)} steps, first in step {steps[0]}."
        for name, steps in not_finite.items()
    ]
    if no_numbers:
        notes.append(f"Not a number, so left out: {', '.join(sorted(no_numbers))}.")
    return clean, notes


def at(config: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    """The value under a dotted key; ``default`` where a run of another version has no such key."""
    value: Any = config
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def _read_config(path: Path) -> tuple[Mapping[str, Any], str]:
    """The configuration and the command above it; both empty when there is no such file."""
    if not path.is_file():
        return {}, ""
    text = path.read_text(encoding="utf-8")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: expected YAML, found {error} [RL7001]") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: expected sections of keys, found {text[:80]!r} [RL7001]")
    first = text.split("\n", 1)[0]
    return values, first.removeprefix("# ") if first.startswith("# ") else ""


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON, found {text[:80]!r} [RL7001]") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: expected a JSON object, found {text[:80]!r} [RL7001]")
    return values


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
