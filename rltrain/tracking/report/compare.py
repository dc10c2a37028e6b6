"""Several runs against the first of them: differences of configuration, and verdicts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rltrain.config.differences import ABSENT, differences
from rltrain.tracking.report.page import header
from rltrain.tracking.report.paired_runs import (
    Interval,
    log_ratio,
    mean_difference,
    share_difference,
)
from rltrain.tracking.report.recipe_curve import NO_EFFECT
from rltrain.tracking.report.run_folder import RunFolder, at, read_run
from rltrain.tracking.report.series import Series, read_series
from rltrain.tracking.report.verdicts import scientific

LAST_SHARE = 1 / 3
"""Of the common steps, those at the end whose reward is compared."""
ACCURACY = re.compile(r"eval/(?:(?!part/)(.+)/)?accuracy")
IGNORED = ("trainer.output_dir",)
SEEDS = ("trainer.seed", "data.seed")
SAME_PROBLEMS = (*NO_EFFECT, "data.seed")
"""Keys of ``data`` that leave the problems those of the same kind."""


@dataclass(frozen=True)
class ComparedRun:
    """One run under a label that no other has."""

    label: str
    run: RunFolder
    series: Mapping[str, Series]

    @property
    def seed(self) -> str:
        return str(at(self.run.config, "trainer.seed", "?"))


@dataclass(frozen=True)
class Comparison:
    """One quantity of one run against the first run.

    ``state`` is ``unjudged`` where the interval contains zero or the runs cannot be compared in it;
    ``verdict`` says which.
    """

    quantity: str
    run: str
    value: str
    interval: str
    verdict: str
    state: Literal["good", "bad", "unjudged"]


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Read the folders of at least two runs.

    Raises:
        ValueError: a folder twice, fewer than two, or one that holds no run.
    """
    if len(folders) < 2:
        raise ValueError(f"expected at least two folders of runs, found {len(folders)} [RL7001]")
    places = [folder.resolve() for folder in folders]
    if len(set(places)) < len(places):
        twice = next(folder for folder in places if places.count(folder) > 1)
        raise ValueError(f"{twice} was given twice: expected folders of different runs [RL7001]")
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            raise ValueError(f"{folder} is no run folder: expected metrics.jsonl in it [RL7001]")
    runs = [read_run(folder) for folder in folders]
    labels = short_labels(places)
    return [
        ComparedRun(label, run, read_series(run.rows))
        for label, run in zip(labels, runs, strict=True)
    ]


def short_labels(folders: Sequence[Path]) -> list[str]:
    """The end of each path, as long as it takes to tell them apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        labels = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(labels)) == len(labels):
            return labels
    raise AssertionError("the paths are different [RL7001]")


def common_metrics(runs: Sequence[ComparedRun]) -> list[str]:
    """Metrics of which every run has a finite value, in the order of the first run."""
    return [
        name
        for name in runs[0].series
        if all(name in run.series and run.series[name].finite for run in runs)
    ]


def config_differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    found = differences([run.run.config for run in runs])
    return {key: values for key, values in found.items() if key not in IGNORED}


def compare_runs(runs: Sequence[ComparedRun]) -> list[Comparison]:
    """Every quantity that the first run shares with another one, with its interval."""
    first, compared = runs[0], []
    for other in runs[1:]:
        changed = data_changes(first, other)
        compared += _accuracies(first, other, changed)
        reward = _common(first, other, "reward/mean")
        if reward:
            interval = mean_difference(*reward, LAST_SHARE)
            compared.append(
                _comparison("Reward, last third", other, interval, _plain, "higher", changed)
            )
        for quantity, name in (("Seconds per step", "time/step"), ("Mismatch k3", "mismatch/k3")):
            if pair := _common(first, other, name):
                compared.append(_comparison(quantity, other, log_ratio(*pair), _factor, "lower"))
    return compared


def data_changes(first: ComparedRun, other: ComparedRun) -> list[str]:
    """Keys that make rewards and accuracies of two runs those of different problems."""
    found = differences([first.run.config, other.run.config])
    return [
        key
        for key, values in found.items()
        if key.startswith("data.") and not key.startswith(SAME_PROBLEMS) and ABSENT not in values
    ]


def _common(first: ComparedRun, other: ComparedRun, name: str) -> tuple[Series, Series] | None:
    pair = first.series.get(name), other.series.get(name)
    return (pair[0], pair[1]) if pair[0] and pair[1] else None


def _accuracies(first: ComparedRun, other: ComparedRun, changed: Sequence[str]) -> list[Comparison]:
    """Of every evaluation set that both runs have."""
    compared = []
    for name in sorted(first.series.keys() & other.series.keys()):
        match = ACCURACY.fullmatch(name)
        if not match:
            continue
        counted = f"{name.removesuffix('accuracy')}num_scored"
        sides = [(run.series[name], run.series.get(counted, Series())) for run in (first, other)]
        title = f"Accuracy, {match[1]}" if match[1] else "Accuracy"
        interval = share_difference(*sides)
        reason = "no evaluation of the same step with its problems counted"
        compared.append(_comparison(title, other, interval, _points, "higher", changed, reason))
    return compared


def _comparison(
    quantity: str,
    other: ComparedRun,
    interval: Interval | None,
    write: Any,
    better: Literal["higher", "lower"],
    changed: Sequence[str] = (),
    reason: str = "fewer than 10 common steps",
) -> Comparison:
    """A winner is named only where the interval excludes zero and the runs have the same data.

    ``reason`` says why there is no interval.
    """
    if interval is None:
        verdict = f"not judged: {reason}"
        return Comparison(quantity, other.label, "", "", verdict, "unjudged")
    value, low, high = (write(x) for x in (interval.difference, interval.low, interval.high))
    shown = f"{low} to {high} ({interval.basis})"
    if changed:
        verdict = f"not judged: other {', '.join(changed)}"
        return Comparison(quantity, other.label, value, shown, verdict, "unjudged")
    if not interval.excludes_zero:
        verdict = "no difference shown"
        return Comparison(quantity, other.label, value, shown, verdict, "unjudged")
    side: Literal["higher", "lower"] = "higher" if interval.difference > 0 else "lower"
    return Comparison(
        quantity, other.label, value, shown, side, "good" if side == better else "bad"
    )


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points"


def _plain(value: float) -> str:
    return f"{value:+.3g}"


def _factor(value: float) -> str:
    """A difference of logarithms as a factor."""
    return f"x {math.exp(value):.3g}"


def notes_of(runs: Sequence[ComparedRun], changes: Mapping[str, Sequence[Any]]) -> list[str]:
    """What a reader must know before believing a verdict."""
    seeds = ", ".join(f"{run.label} has seed {run.seed}" for run in runs)
    notes = [
        f"One seed each: {seeds}. The intervals cover the problems and the steps of these runs. "
        "They do not cover what other seeds would give."
    ]
    if changes and all(key in SEEDS for key in changes):
        notes.append("The runs differ in the seed alone: what differs is what seeds do.")
    if not common_metrics(runs):
        notes.append("The runs have no metric in common: there is nothing to compare.")
    machines = {str(run.run.versions.get("machine", "?")) for run in runs}
    if len(machines) > 1:
        notes.append(f"The runs ran on different machines: {'; '.join(sorted(machines))}.")
    if len(runs) > 2:
        notes.append(f"Every run is compared with {runs[0].label}, each at 95 % by itself.")
    notes += [f"{run.label}: {note}" for run in runs for note in run.run.notes]
    return notes


def last_numbers(run: ComparedRun) -> dict[str, str]:
    """A few numbers of one run for the terminal."""

    def last(name: str, write: Any) -> str:
        known = run.series[name].finite if name in run.series else []
        return write(known[-1]) if known else "-"

    def mean(name: str, write: Any) -> str:
        known = run.series[name].finite if name in run.series else []
        return write(sum(known) / len(known)) if known else "-"

    return {
        "run": run.label,
        "steps": header(run.run)["steps"],
        "seed": run.seed,
        "accuracy": last("eval/accuracy", lambda v: f"{v:.1%}"),
        "reward": last("reward/mean", lambda v: f"{v:.3g}"),
        "s/step": mean("time/step", lambda v: f"{v:.2f}"),
        "k3": mean("mismatch/k3", scientific),
        "outcome": str(run.run.outcome.get("state", "not ended")),
    }
