"""Checks names and values against the catalogue, and generates docs/metrics.md from it.

The tracker rejects a name that is not in `rltrain.tracking.catalogue`: every logged number is
documented.
"""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache

from rltrain.tracking.catalogue import METRICS, SECTIONS
from rltrain.tracking.catalogue_metric import Metric

INTRODUCTION = """\
# Metrics

Look up a number of a report, of wandb or of `metrics.jsonl` here: its formula, what it is a mean
over, and whether higher or lower is better.

Names are `area/name`. `E` is the mean over the denominator, always of the global batch. A metric
without data in a step is left out of that step; it is never logged as zero. `sampled` means on the
first and every `routing_replay.sample_every`-th step.

`d = log pi_train - log pi_rollout` of a sampled token, clamped to [-20, 20], as is its sum over a
response; `rho = exp(d)`. Standard deviations divide by the count. `mismatch/` scores the batch as
it was trained, with routing replay if it is on. `mismatch_native/` scores the same batch with
native routing.

A response token is *flipped* if a routing difference can change its log-probability. That is the
case if the engine and native routing in the trainer chose different experts (a) in any layer, at
the position that predicts the token, or (b) at an earlier position, in any layer except the last.
The last layer's output at earlier positions is not read by attention.

This page is generated from `rltrain/tracking/catalogue.py` by
`python -m rltrain.tracking.metrics > docs/metrics.md`; a test holds it current."""


@cache
def find_metric(name: str) -> Metric:
    """The catalogue's entry for a metric's name.

    Raises:
        ValueError: when there is none; names the nearest.
    """
    metric = lookup_metric(name)
    if metric is not None:
        return metric
    near = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=1, cutoff=0.0)
    raise ValueError(
        f"{name!r} is not a known metric; the nearest is {near[0]!r}. "
        "Log that, or add the new one to the catalogue (rltrain/tracking/catalogue.py)"
        " [RL7006]"
    )


@cache
def lookup_metric(name: str) -> Metric | None:
    """The catalogue's entry for a metric's name; None for one of another version or program."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raise ValueError unless every name is in the catalogue and every value is a number."""
    for name, value in metrics.items():
        find_metric(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: expected an int or a float, found {value!r} [RL7006]")


def describe(metric: Metric) -> str:
    """An entry of the catalogue in one line, for the pages of trackers."""
    over = "" if metric.denominator == "-" else f", over {metric.denominator}"
    better = "" if metric.better == "neither" else f"; {metric.better} is better"
    return f"{metric.formula}{over}. Unit: {metric.unit}{better}"


def document(metrics: Iterable[Metric] = METRICS) -> str:
    """The text of docs/metrics.md."""
    lines = [INTRODUCTION]
    grouped = {section: [m for m in metrics if m.section == section] for section in SECTIONS}
    for section, rows in grouped.items():
        lines += [
            "",
            f"## {section.capitalize()}",
            "",
            "| name | formula | denominator | unit | when | better |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_row(metric) for metric in rows),
        ]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    cells = (
        f"`{metric.name}`",
        metric.formula,
        metric.denominator,
        metric.unit,
        metric.when,
        "-" if metric.better == "neither" else metric.better,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
