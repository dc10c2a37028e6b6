"""How well a model learns from tokens of older weights, with and without replay of their routes.

    python -m benchmarks.staleness base FOLDER            # task, and model to start from
    python -m benchmarks.staleness run FOLDER --at-once 30   # what is not there yet; ends in order
    python -m benchmarks.staleness table FOLDER              # as Markdown

Every batch of a run has the same age: a schedule says with which weights it is started. Runs in
flight take the ages that come of themselves, below the bound. A run is one core's work for some
minutes; those of the first seed come first, so that what is missing is missing everywhere alike.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import median_interval
from benchmarks.staleness_task import write_task
from rltrain.tracking.jsonl import read_jsonl

ROOT = Path(__file__).parents[1]
STEPS = 40
SEEDS = range(5)
AGES = (0, 1, 2, 4, 8)
IN_FLIGHT = (1, 4)
TIS = ("algorithm.correction.weight=token",)
MODES = {
    "off": ("routing_replay=off",),
    "r2": ("routing_replay=r2",),
    "r3": (),
    "r3_max_age": ("routing_replay.max_age=0",),
    "r3_min_gate": ("routing_replay.min_gate_ratio=0.5",),
}
COMMON = (
    *("+recipe=grpo_moe_r3", "cluster.device=cpu", "data=jsonl", "tracking.backends=[]"),
    *("trainer.prompts_per_step=32", "trainer.eval_every=10", f"trainer.steps={STEPS}"),
    *("data.max_prompt_tokens=16", "rollout.max_response_tokens=32"),
    *("checkpoint.last=false", "routing_replay.sample_every=1000"),
    *("optimizer.lr=3e-4", "optimizer.warmup_steps=5"),
)


@dataclass(frozen=True)
class Run:
    mode: str
    age: int
    is_corrected: bool
    seed: int
    is_in_flight: bool = False

    @property
    def kind(self) -> str:
        age = f"{self.age}f" if self.is_in_flight else str(self.age)
        return f"{self.mode}.{age}.{'tis' if self.is_corrected else 'plain'}"

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.seed}"

    def overrides(self, folder: Path) -> list[str]:
        ahead = [f"trainer.max_staleness={self.age}"]
        if self.is_in_flight:
            ahead += ["rollout.update_in_flight=true"]
        elif self.age:
            ahead += [f"trainer.schedule={folder / f'age_{self.age}.jsonl'}"]
        return [
            *COMMON,
            *(f"{key}={folder / file}" for key, file in FILES.items()),
            f"data.reward.function={folder / 'reward.py'}:score",
            *MODES[self.mode],
            *(TIS if self.is_corrected else ()),
            *ahead,
            f"trainer.seed={self.seed}",
            f"trainer.output_dir={folder / 'runs' / self.name}",
        ]


FILES = {
    "model.path": "model",
    "data.path": "train.jsonl",
    "data.eval_path": "held_out.jsonl",
}


def runs() -> Iterator[Run]:
    for seed in SEEDS:
        for is_corrected in (False, True):
            for mode in MODES:
                ages = AGES if mode != "r3_max_age" else AGES[1:]  # none is older than 0 there
                for age in ages:
                    yield Run(mode, age, is_corrected, seed)
                for age in IN_FLIGHT:
                    yield Run(mode, age, is_corrected, seed, is_in_flight=True)


def make_base(folder: Path) -> None:
    """The task, the schedules, and a tiny model that learned the warm-start set."""
    folder.mkdir(parents=True, exist_ok=True)
    write_task(folder)
    for age in AGES[1:]:
        rows = (
            {"step": step, "event": "started", "after": max(0, step - 1 - age), "age": age}
            for step in range(1, STEPS + 1)
        )
        (folder / f"age_{age}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = folder / "warm_start"
    train = [
        *("+recipe=sft_tiny", "cluster.device=cpu", "data=jsonl", "tracking.backends=[]"),
        *(f"data.path={folder / 'warm_start.jsonl'}", "trainer.eval_every=0", "trainer.steps=600"),
        *("policy.threads=1", "rollout.max_response_tokens=32", f"trainer.output_dir={run}"),
    ]
    _rltrain(["rltrain.main", *train])
    _rltrain(["rltrain.cli.app", "export", str(run), str(folder / "model")])


def _rltrain(command: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)


def execute(folder: Path, at_once: int, seconds: float) -> None:
    """Begin runs for so many seconds, and wait for those that have begun."""
    end = time.monotonic() + seconds
    is_free = dict.fromkeys(range(at_once), True)
    going: dict[subprocess.Popen[bytes], tuple[int, Run]] = {}
    waiting = [run for run in runs() if not is_done(folder, run)]
    cores = sorted(os.sched_getaffinity(0))
    while going or (waiting and time.monotonic() < end):
        for process in [one for one in going if one.poll() is not None]:
            slot, run = going.pop(process)
            is_free[slot] = True
            sys.stdout.write(f"{run.name}: exit status {process.returncode}\n")
            sys.stdout.flush()
        free = [slot for slot, free in is_free.items() if free]
        if free and waiting and time.monotonic() < end:
            run = waiting.pop(0)
            log = folder / "logs" / f"{run.name}.log"
            log.parent.mkdir(exist_ok=True)
            core = cores[free[0] * len(cores) // at_once]
            command = ["taskset", "-c", str(core), sys.executable, "-m", "rltrain.main"]
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*command, *run.overrides(folder)], stdout=file, stderr=file, cwd=ROOT
                )
            going[process] = (free[0], run)
            is_free[free[0]] = False
        time.sleep(0.2)


def is_done(folder: Path, run: Run) -> bool:
    file = folder / "runs" / run.name / "metrics.jsonl"
    return file.exists() and read_jsonl(file)[-1]["step"] == STEPS


def table(folder: Path) -> str:
    """Of each kind of run: accuracy by seed, and what the last half of it looked like."""
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for run in runs():
        if is_done(folder, run):
            rows = read_jsonl(folder / "runs" / run.name / "metrics.jsonl")
            found.setdefault(run.kind, []).append(rows)
    head = (
        "run",
        "accuracy at the end, by seed",
        "median",
        "best on the way",
        "k3",
        "largest ratio",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind, seeds in sorted(found.items()):
        evaluated = [[r["eval/accuracy"] for r in rows if "eval/accuracy" in r] for rows in seeds]
        final = [100 * accuracies[-1] for accuracies in evaluated]
        middle = median_interval(final)
        cells = [
            f"`{kind}`",
            ", ".join(f"{x:.0f}" for x in final),
            f"**{middle.value:.0f}** ({middle.low:.0f} to {middle.high:.0f})",
            f"{statistics.median(100 * max(accuracies) for accuracies in evaluated):.0f}",
            f"{statistics.median(_column(seeds, 'mismatch/k3')):.1e}",
            f"{max(_column(seeds, 'policy/ratio_max')):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _column(seeds: Sequence[Sequence[dict[str, Any]]], name: str) -> list[float]:
    return [row[name] for rows in seeds for row in rows[STEPS // 2 :] if name in row]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__)
    parser.add_argument("what", choices=("base", "run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e9, help="in which runs are begun")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    if asked.what == "base":
        make_base(folder)
    elif asked.what == "run":
        execute(folder, asked.at_once, asked.seconds)
    else:
        sys.stdout.write(table(folder) + "\n")


if __name__ == "__main__":
    main()
