"""The few numbers that summarize a run, and a verdict on each.

A verdict compares a number with its spread in the same run: for a mismatch, over the steps at which
it was measured; for an accuracy, by the number of problems. If the steps disagree, or a change is
within the spread, the verdict is ``mixed``: neither good nor bad.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]
State = Literal["good", "mixed", "bad", "unjudged"]

Z_95 = 1.96
"""Two-sided 95 % of a normal distribution."""


@dataclass(frozen=True)
class Verdict:
    label: str
    value: str
    detail: str
    state: State


def column(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged and finite."""
    logged = [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in logged], [value for _, value in logged]


def scientific(value: float) -> str:
    """``2.4e-5``: two digits and no padding."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def verdicts(rows: Rows, replay: str) -> list[Verdict]:
    """The verdicts that the rows of metrics.jsonl have numbers for.

    Only ``r3`` promises a smaller mismatch. With other modes the mismatch is shown and not judged.
    """
    judged = replay == "r3"
    candidates = (_accuracy(rows), _coverage(rows), _k3(rows, judged), _flipped(rows, judged))
    return [verdict for verdict in candidates if verdict is not None]


def _accuracy(rows: Rows) -> Verdict | None:
    """First against last evaluation, by the 95 % interval of two shares of that many problems."""
    steps, values = column(rows, "eval/accuracy")
    if len(values) < 2:
        return None
    first, last, best = values[0], values[-1], max(values)
    _, counts = column(rows, "eval/num_scored")
    change = f"{100 * (last - first):+.1f}"
    shares = all(0 <= value <= 1 for value in values)
    if len(counts) != len(values) or not shares:
        reason = "problems not counted" if shares else "not between 0 and 1"
        return Verdict(
            "Accuracy",
            f"{first:.1%} to {last:.1%}",
            f"{change} points from step {steps[0]} to {steps[-1]}; {reason}",
            "unjudged",
        )
    spread = share_spread((first, counts[0]), (last, counts[-1]))
    detail = f"{change} +- {100 * spread:.1f} points from step {steps[0]} to {steps[-1]}"
    peak = values.index(best)
    fell = best - last > share_spread((best, counts[peak]), (last, counts[-1]))
    if fell:
        detail += f"; {best:.1%} at step {steps[peak]}"
    state: State = "mixed"
    if last < first - spread:
        state = "bad"
    elif last > first + spread and not fell:
        state = "good"
    return Verdict("Accuracy", f"{first:.1%} to {last:.1%}", detail, state)


def share_spread(*shares: tuple[float, float]) -> float:
    """Half the 95 % interval of the difference between two ``(share, number of problems)``.

    One success and one failure are added to both shares: the interval of 0 of n would else be empty
    (Agresti and Caffo 2000). Evaluations use the same problems, so the true interval is narrower.
    """
    smoothed = [((p * n + 1) / (n + 2), n + 2) for p, n in shares]
    return Z_95 * math.sqrt(sum(p * (1 - p) / n for p, n in smoothed))


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
        f"native {scientific(native)}{_times_lower(both, 'k3', trained, native)}; "
        f"{tokens:,.0f} tokens",
        _state(both, "k3", judged),
    )


def _flipped(rows: Rows, judged: bool) -> Verdict | None:
    name = "abs_diff_median_flipped"
    both = _both(rows, name)
    flipped = sum(row["mismatch/num_flipped"] for row in both)
    if not flipped:
        return None
    trained, native = (
        statistics.median(row[f"{area}/{name}"] for row in both)
        for area in ("mismatch", "mismatch_native")
    )
    return Verdict(
        "Median |diff|, flipped",
        scientific(trained),
        f"native {scientific(native)}{_times_lower(both, name, trained, native)}; "
        f"{flipped:,.0f} tokens",
        _state(both, name, judged),
    )


def _state(both: Rows, name: str, judged: bool) -> State:
    """Good if every measured step is lower than natively. A single step has no spread."""
    if not judged:
        return "unjudged"
    lower = [row[f"mismatch/{name}"] < row[f"mismatch_native/{name}"] for row in both]
    if not any(lower):
        return "bad"
    if len(lower) == 1:
        return "unjudged"
    return "good" if all(lower) else "mixed"


def _both(rows: Rows, name: str) -> list[Mapping[str, Any]]:
    """Rows where the metric is there as trained and native, so that the batch is the same."""
    counts = "num_flipped" if name.endswith("flipped") else "num_tokens"
    needed = (f"mismatch/{name}", f"mismatch_native/{name}", f"mismatch/{counts}")
    return [row for row in rows if all(row.get(key) is not None for key in needed)]


def _times_lower(both: Rows, name: str, trained: float, native: float) -> str:
    """How many times lower than natively: over all measured steps, and the range over them."""
    if min(trained, native) <= 0:
        return ""
    ratios = [
        row[f"mismatch_native/{name}"] / row[f"mismatch/{name}"]
        for row in both
        if row[f"mismatch/{name}"] > 0
    ]
    overall = f", {native / trained:.1f}x lower"
    if len(both) == 1:
        return f"{overall} on the one step measured"
    return f"{overall} ({min(ratios):.1f} to {max(ratios):.1f} over {len(both)} steps)"
