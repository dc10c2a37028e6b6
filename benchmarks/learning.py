"""What the tiny recipes learn, three seeds each, and what off-policy steps do to replay.

    python -m benchmarks.learning list                 # NAME OVERRIDES..., one run per line
    python -m benchmarks.learning table FOLDER         # of run folders named NAME, as Markdown
    python -m benchmarks.learning curves FOLDER FILE   # the off-policy runs' accuracy, as SVG

Put each line of ``list`` after ``python -m rltrain.main`` and add ``trainer.output_dir=
FOLDER/NAME``. A run takes one core 2 to 4 minutes, so run as many at once as there are cores.
``curves`` draws with matplotlib, which reasoning-gym installs.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from rltrain.tracking.jsonl import read_jsonl

RECIPES = [
    *(
        "grpo_moe_r3",
        "grpo_moe_r3_async",
        "grpo_moe_r2",
        "grpo_moe_off",
        "dr_grpo_moe_r3",
        "dapo_moe_r3",
        "gspo_moe_r3",
    ),
    *("cispo_moe_r3", "rloo_moe_r3", "ppo_moe_r3", "sft_tiny"),
]
SPLIT = "+recipe=grpo_moe_r3 trainer.mini_batches=8 trainer.eval_every=4"
STALE = f"{SPLIT} trainer.sync_every=4"
TIS = "algorithm.correction.weight=token"
ICEPOP = f"{TIS} algorithm.correction.weight_min=0.5 algorithm.correction.weight_max=5.0"
ICEPOP += " algorithm.correction.outside=mask"
OFF_POLICY = {
    **{f"split_{mode}": f"{SPLIT} routing_replay={mode}" for mode in ("off", "r2", "r3")},
    **{f"stale_{mode}": f"{STALE} routing_replay={mode}" for mode in ("off", "r2", "r3")},
    **{f"stale_{mode}_tis": f"{STALE} routing_replay={mode} {TIS}" for mode in ("off", "r3")},
    "stale_r3_icepop": f"{STALE} routing_replay=r3 {ICEPOP}",
}
MORE_SEEDS = {"stale_off", "stale_r2", "stale_r3"}
"""Five seeds: their runs end far apart."""
THRESHOLD = 0.8
COLORS = {
    "stale_off": "#6b7280",
    "stale_r2": "#8a63c9",
    "stale_r3": "#2563c9",
    "stale_off_tis": "#d9822b",
    "stale_r3_tis": "#1a7f4b",
}

Rows = Sequence[Mapping[str, Any]]


def runs() -> dict[str, str]:
    """Every run's overrides, by name."""
    found = {
        f"{r}.{seed}": f"+recipe={r} trainer.seed={seed}" for r in RECIPES for seed in (0, 1, 2)
    }
    for name, overrides in OFF_POLICY.items():
        for seed in range(5 if name in MORE_SEEDS else 3):
            found[f"{name}.{seed}"] = f"{overrides} trainer.seed={seed}"
    return found


def read(folder: Path) -> dict[str, list[Rows]]:
    """The rows of each kind of run, seed by seed."""
    found: dict[str, list[Rows]] = {}
    for name in runs():
        if (file := folder / name / "metrics.jsonl").exists():
            found.setdefault(name.rpartition(".")[0], []).append(read_jsonl(file))
    return found


def table(found: Mapping[str, list[Rows]]) -> str:
    header = ["run", "final accuracy, by seed", "mean", f"steps to {THRESHOLD:.0%}"]
    header += ["k3", "k3 with native routing", "largest ratio"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, seeds in found.items():
        lines.append("| " + " | ".join([f"`{name}`", *_cells(seeds)]) + " |")
    return "\n".join(lines)


def _cells(seeds: Sequence[Rows]) -> list[str]:
    if "sft/loss" in seeds[0][-1]:
        last = [statistics.mean(row["sft/loss"] for row in rows[-20:]) for rows in seeds]
        return [
            f"loss {', '.join(f'{x:.2f}' for x in last)}",
            f"{statistics.mean(last):.2f}",
            *"----",
        ]
    final = [100 * column(rows, "eval/accuracy")[-1] for rows in seeds]
    first = [_first_step(rows) for rows in seeds]
    return [
        ", ".join(f"{x:.1f}" for x in final),
        f"**{statistics.mean(final):.1f}**",
        ", ".join("never" if step is None else str(step) for step in first),
        f"{_median(seeds, 'mismatch/k3'):.1e}",
        f"{_median(seeds, 'mismatch_native/k3'):.1e}",
        f"{max(max(column(rows, 'policy/ratio_max')) for rows in seeds):.1f}",
    ]


def by_staleness(found: Mapping[str, list[Rows]]) -> str:
    """Median k3 by how many steps old the sampling weights were."""
    ages = (0, 1, 2, 3)
    lines = ["| run | " + " | ".join(f"{age} steps old" for age in ages) + " |", "|---" * 5 + "|"]
    for name, seeds in found.items():
        if not name.startswith("stale"):
            continue
        rows = [row for seed in seeds for row in seed if "mismatch/k3" in row]
        k3 = [
            statistics.median(r["mismatch/k3"] for r in rows if r["rollout/staleness"] == age)
            for age in ages
        ]
        lines.append(f"| `{name}` | " + " | ".join(f"{x:.1e}" for x in k3) + " |")
    return "\n".join(lines)


def column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _median(seeds: Sequence[Rows], name: str) -> float:
    return statistics.median(value for rows in seeds for value in column(rows, name))


def _first_step(rows: Rows) -> int | None:
    """The first evaluated step at or above ``THRESHOLD``."""
    return next((row["step"] for row in rows if row.get("eval/accuracy", 0) >= THRESHOLD), None)


def curves(found: Mapping[str, list[Rows]], file: str) -> str:
    """Draw the mean accuracy over the seeds of the runs in ``COLORS``, and return the file."""
    figure, axes = pyplot.subplots(figsize=(6.5, 3.2))
    for name, color in COLORS.items():
        evaluated = [[row for row in rows if "eval/accuracy" in row] for rows in found[name]]
        steps = [row["step"] for row in evaluated[0]]
        means = [
            statistics.mean(rows[i]["eval/accuracy"] for rows in evaluated)
            for i in range(len(steps))
        ]
        axes.plot(steps, means, marker="o", markersize=3, color=color, label=name)
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1))
    axes.legend(frameon=False, ncols=2)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(file, format="svg", bbox_inches="tight")
    return file


def main(arguments: Sequence[str]) -> None:
    commands: dict[str, Callable[..., str]] = {
        "list": lambda: "\n".join(f"{name} {overrides}" for name, overrides in runs().items()),
        "table": lambda folder: (
            f"{table(read(Path(folder)))}\n\n{by_staleness(read(Path(folder)))}"
        ),
        "curves": lambda folder, file: curves(read(Path(folder)), file),
    }
    if not arguments or arguments[0] not in commands:
        sys.exit(__doc__)
    print(commands[arguments[0]](*arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
