"""Samples per second of runs whose engines generate ahead, against what no overlap could beat.

    python -m benchmarks.asynchronous --out FILE [--runs 0 1 1f] [--steps 24] [name=value ...]

A run is called by its ``trainer.max_staleness``, and ``f`` where weights change in flight. The runs
follow one another, and the first, which has to be 0, is also the ceiling: of its median step, the
longer of what it generates in and what it does else. A run of twice as many steps would say the
same; the first three are not counted, since kernels are compiled in them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.controller.speed import WAITING
from rltrain.tracking.environment import describe_environment
from rltrain.tracking.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
FIRST = 4
GENERATING = tuple(f"time/{phase}" for phase in WAITING)
RUN = (
    "+recipe=grpo_moe_r3",
    "algorithm=grpo_async",
    "cluster.placement=disaggregated",
    "routing_replay.sample_every=1000",
    "trainer.eval_every=0",
    "tracking.backends=[]",
)
SHOWN = ("time/step", *GENERATING, "time/update", "time/old_logprobs", "time/weight_sync")
SHOWN += ("throughput/trainer_idle_fraction", "rollout/engines_busy_fraction", "rollout/staleness")
SHOWN += ("mismatch/k3", "rollout/generate_seconds")


def overrides(name: str) -> list[str]:
    in_flight = name.endswith("f")
    bound = int(name.removesuffix("f"))
    return [f"trainer.max_staleness={bound}", f"rollout.update_in_flight={str(in_flight).lower()}"]


def execute(name: str, more: Sequence[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of the steps that count."""
    out = folder / name
    command = [sys.executable, "-m", "rltrain.main", *RUN, *overrides(name), *more]
    command += [f"trainer.steps={steps}", f"trainer.output_dir={out}"]
    command += [f"model.cache_dir={folder / 'models'}"]
    with (folder / f"{name}.log").open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, check=False).returncode
    assert status == 0, (folder / f"{name}.log").read_text()[-3000:]
    rows: list[dict[str, Any]] = read_jsonl(out / "metrics.jsonl")
    return [row for row in rows if row["step"] >= FIRST]


def summary(rows: Sequence[Mapping[str, float]], samples: int) -> dict[str, float]:
    """Medians of a step, and samples per second over all of them."""
    seconds = sum(row["time/step"] for row in rows)
    shown = {name: [row[name] for row in rows if name in row] for name in SHOWN}
    medians = {name: statistics.median(values) for name, values in shown.items() if values}
    return {"samples_per_second": len(rows) * samples / seconds, **medians}


def ceiling(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of a step that generates and trains one after the other, by what it does."""
    generating = [sum(row.get(name, 0.0) for name in GENERATING) for row in rows]
    rest = [row["time/step"] - spent for row, spent in zip(rows, generating, strict=True)]
    return {"generate": statistics.median(generating), "train": statistics.median(rest)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", default=["0", "1", "1f"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--samples", type=int, default=64 * 8, help="prompts x responses of a step")
    asked, more = parser.parse_known_args()
    result: dict[str, Any] = {"conditions": describe_environment(), "overrides": more}
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.runs:
            rows = execute(name, more, asked.steps, Path(folder))
            result[name] = summary(rows, asked.samples)
            if name == asked.runs[0]:
                result["ceiling"] = ceiling(rows)
            longest = max(result["ceiling"].values())
            result[name]["of_ceiling"] = (
                result[name]["samples_per_second"] * longest / asked.samples
            )
            asked.out.write_text(json.dumps(result, indent=2) + "\n")
            sys.stdout.write(f"{name}: {json.dumps(result[name])}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
