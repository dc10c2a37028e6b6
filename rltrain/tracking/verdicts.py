"""The few numbers a run is judged by, and whether each is as it should be."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    label: str
    value: str
    detail: str
    state: Literal["good", "bad", "unjudged"]


def column(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged and finite."""
    found = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def scientific(value: float) -> str:
    """``2.4e-5``: two digits and no padding."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def verdicts(rows: Rows, replay: str) -> list[Verdict]:
    """Those that the rows of metrics.jsonl have numbers for.

    Only ``r3`` promises a smaller mismatch; under the other modes it is shown and not judged.
    """
    judged = replay == "r3"
    candidates = (_accuracy(rows), _coverage(rows), _k3(rows, judged), _flipped(rows, judged))
    return [verdict for verdict in candidates if verdict is not None]


def _accuracy(rows: Rows) -> Verdict | None:
    steps, values = column(rows, "eval/accuracy")
    if len(values) < 2:
        return None
    gain = 100 * (values[-1] - values[0])
    return Verdict(
        "Accuracy",
        f"{values[0]:.1%} to {values[-1]:.1%}",
        f"{gain:+.1f} points from step {steps[0]} to {steps[-1]}",
        "good" if gain > 0 else "bad",
    )


def _coverage(rows: Rows) -> Verdict | None:
    _, values = column(rows, "routing/coverage")
    if not values:
        return None
    lossy = sum(value < 1 for value in values)
    return Verdict(
        "Route coverage",
        "1.0" if min(values) == 1 else f"{min(values):.6g}",
        f"lowest of {len(values)} steps; {lossy or 'none'} below",
        "bad" if lossy else "good",
    )


def _k3(rows: Rows, judged: bool) -> Verdict | None:
    """Over all response tokens of the steps where both were measured on the same batch."""
    both = _both(rows, "k3")
    tokens = sum(row["mismatch/num_tokens"] for row in both)
    if not tokens:
        return None
    trained, native = (
        sum(row[f"{area}/k3"] * row["mismatch/num_tokens"] for row in both) / tokens
        for area in ("mismatch", "mismatch_native")
    )
    return Verdict(
        "Mismatch k3",
        scientific(trained),
        f"native {scientific(native)}{_times_lower(trained, native)}; {tokens:,.0f} tokens",
        _state(trained < native, judged),
    )


def _flipped(rows: Rows, judged: bool) -> Verdict | None:
    both = _both(rows, "abs_diff_median_flipped")
    flipped = sum(row["mismatch/num_flipped"] for row in both)
    if not flipped:
        return None
    trained, native = (
        statistics.median(row[f"{area}/abs_diff_median_flipped"] for row in both)
        for area in ("mismatch", "mismatch_native")
    )
    return Verdict(
        "Median |diff|, flipped",
        scientific(trained),
        f"native {scientific(native)}{_times_lower(trained, native)}; {flipped:,.0f} tokens",
        _state(trained <= native / 2, judged),
    )


def _state(passed: bool, judged: bool) -> Literal["good", "bad", "unjudged"]:
    return "unjudged" if not judged else "good" if passed else "bad"


def _both(rows: Rows, name: str) -> list[Mapping[str, Any]]:
    """Rows where the metric is there as trained and native, so that the batch is the same."""
    counts = "num_flipped" if name.endswith("flipped") else "num_tokens"
    needed = (f"mismatch/{name}", f"mismatch_native/{name}", f"mismatch/{counts}")
    return [row for row in rows if all(row.get(key) is not None for key in needed)]


def _times_lower(trained: float, native: float) -> str:
    return f", {native / trained:.1f}x lower" if 0 < trained < native else ""
