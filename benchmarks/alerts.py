"""How often the alerts of `rltrain.tracking.alerts` are false, and what they find.

    python -m benchmarks.alerts RUN_DIR ...

Replays metrics.jsonl of each run. Then made-up runs, whose steps are drawn from one real run about
a trend: as they are, for false alarms, and with a fault, for what is found and how late. Name
healthy runs alone.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rltrain.config.trainer import AlertsConfig
from rltrain.tracking.alerts import WATCHED, Alert, Watch
from rltrain.tracking.jsonl import read_jsonl

SETTINGS = AlertsConfig()
NUM_RUNS, NUM_STEPS, FAULT = 100, 300, 200
Row = dict[str, Any]


def replay(rows: list[Row]) -> list[Alert]:
    watch = Watch(SETTINGS)
    return [alert for row in rows for alert in watch.take(row["step"], row)]


def made_up(rows: list[Row], noise: random.Random) -> list[Row]:
    """A run of ``NUM_STEPS`` steps, each a random one of ``rows`` about medians that drift: the
    reward's to 1, the entropy's to half, the length's to 0.6, 1 or 3 times itself."""
    names = [name for name in WATCHED if all(row.get(name) is not None for row in rows)]
    first = median(row["reward/mean"] for row in rows)
    ends = {"policy/entropy": 0.5, "rollout/response_length_mean": noise.choice([0.6, 1, 3])}
    run = []
    for step in range(1, NUM_STEPS + 1):
        odd, done = noise.choice(rows), step / NUM_STEPS
        row: Row = {name: odd[name] * (1 + (ends.get(name, 1) - 1) * done) for name in names}
        row["reward/mean"] += (1 - first) * done
        run.append(row | {"step": step})
    return run


def _scaled(metric: str, factor: float, steps: int) -> Callable[[Row], None]:
    """The metric goes to ``factor`` times itself within ``steps`` steps."""

    def fault(row: Row) -> None:
        share = min(1.0, (row["step"] - FAULT + 1) / steps)
        row[metric] *= 1 + (factor - 1) * share

    return fault


FAULTS: Mapping[str, tuple[str, Callable[[Row], None]]] = {
    "entropy to a twentieth in 30 steps": (
        "entropy_collapse",
        _scaled("policy/entropy", 0.05, 30),
    ),
    "length to a fifth in 10 steps": (
        "length_collapse",
        _scaled("rollout/response_length_mean", 0.2, 10),
    ),
    "reward to a fifth in 20 steps": ("reward_collapse", _scaled("reward/mean", 0.2, 20)),
    "a third of the throughput, at once": (
        "throughput_drop",
        _scaled("throughput/tokens_per_second", 0.33, 1),
    ),
    "k3 times 1000 in every step": ("mismatch_spike", _scaled("mismatch/k3", 1000, 1)),
    "a row in a thousand without routes": (
        "missing_routes",
        _scaled("routing/coverage", 0.999, 1),
    ),
}


def report(folders: list[Path]) -> None:
    runs = {folder: read_jsonl(folder / "metrics.jsonl") for folder in folders}
    print("| run | steps | alerts |\n|---|---|---|")
    for folder, rows in runs.items():
        said = ", ".join(f"{a.kind} in step {a.step} since {a.since}" for a in replay(rows))
        print(f"| {folder} | {rows[-1]['step']} | {said or 'none'} |")
    noise = random.Random(0)
    # Step 1 has a start-up in its throughput, and step 0 is an evaluation.
    pools = [[row for row in rows if row["step"] > 1] for rows in runs.values()]
    healthy = [a for _ in range(NUM_RUNS) for a in replay(made_up(noise.choice(pools), noise))]
    print(f"\n{len(healthy)} false alerts in {NUM_RUNS} made-up runs of {NUM_STEPS} steps:")
    print(*(f"- {kind}: {n}" for kind, n in Counter(a.kind for a in healthy).items()), sep="\n")
    print(
        f"\n| fault from step {FAULT} on | runs in which it is found | steps until then, median |"
    )
    print("|---|---|---|")
    for name, (kind, fault) in FAULTS.items():
        delays = []
        for _ in range(NUM_RUNS):
            run = made_up(noise.choice(pools), noise)
            for row in run[FAULT - 1 :]:
                fault(row)
            delays += [
                a.step - FAULT + 1 for a in replay(run) if a.kind == kind and a.step >= FAULT
            ][:1]
        late = f"{median(delays):.0f}" if delays else "-"
        print(f"| {name} | {len(delays)} of {NUM_RUNS} | {late} |")


if __name__ == "__main__":
    report([Path(folder) for folder in sys.argv[1:]])
