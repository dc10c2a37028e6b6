"""Charts of one page as plain data, for its JSON: what `charts.js` draws.

Pure functions of series. `ChartPage` gathers the charts of a page and the series that they use.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rltrain.tracking.report.chart_specs import ChartSpec, LineSpec, Unit
from rltrain.tracking.report.series import (
    SMOOTHING_WINDOW,
    SPIKE_WINDOW,
    SPIKE_Z,
    PackedSeries,
    Series,
    smoothed,
    spikes,
)

Style = Literal["line", "faint", "points", "expected"]
LOG_SPAN = 100.0
"""Offer a logarithmic axis from this ratio of the largest to the smallest value."""
MAX_VALUES = 280_000
"""Values in the line charts of a page: 1.5 MB, or 2.2 MB where each series has its own steps."""
MAX_POINTS = 5_000
FEWEST_POINTS = 200
LISTED_POINTS = 120


@dataclass(frozen=True)
class Line:
    """``color`` is a slot of the palette. ``spikes`` are (step, value) to mark."""

    key: str
    label: str
    color: int
    style: Style = "line"
    spikes: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """One figure. ``group`` is the name of what it is zoomed with; ``x`` names its axis."""

    id: str
    kind: Literal["lines", "stack", "heatmap"]
    title: str
    summary: str
    caption: str = ""
    lines: tuple[Line, ...] = ()
    unit: Unit = "number"
    log: Literal["off", "switch", "on"] = "off"
    bounds: tuple[float, float] | None = None
    group: str = "steps"
    x: str = "step"
    wide: bool = False
    heatmap: Mapping[str, Any] | None = None


@dataclass
class ChartPage:
    """The charts of a page, by their section, and the series they draw.

    ``listed`` are series that the page draws when asked for, in less detail.
    """

    sections: dict[str, list[Chart]] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    listed: dict[str, Series] = field(default_factory=dict)

    def add(self, section: str, chart: Chart | None) -> None:
        if chart is not None:
            self.sections.setdefault(section, []).append(chart)

    def next_id(self) -> str:
        return f"chart-{sum(map(len, self.sections.values())) + 1}"

    def data(self) -> dict[str, Any]:
        """For the page's JSON. Long series are thinned, so that the page stays small."""
        points = min(MAX_POINTS, max(FEWEST_POINTS, MAX_VALUES // max(1, len(self.series))))
        packed = PackedSeries()
        for key, series in self.series.items():
            packed.add(key, series, points)
        for key in self.listed.keys() - self.series.keys():
            packed.add(key, self.listed[key], LISTED_POINTS)
        charts = {chart.id: asdict(chart) for charts in self.sections.values() for chart in charts}
        return {"charts": charts, "steps": packed.steps, "series": packed.series}


def draw(
    page: ChartPage,
    section: str,
    spec: ChartSpec,
    series: Mapping[str, Series],
    extra: Sequence[Line] = (),
    group: str = "steps",
    x: str = "step",
) -> None:
    """Add the chart of ``spec`` to the page, if the run has logged one of its metrics."""
    lines: list[Line] = []
    for line in spec.lines:
        for name, label in line.matching(series):
            lines += _lines(page, name, label, line, series[name], len(lines))
    if not lines:
        return
    values = [v for line in lines for v in page.series[line.key].finite]
    if not values or (spec.nonzero and not any(values)):
        return
    page.add(
        section,
        Chart(
            id=page.next_id(),
            kind="lines",
            title=spec.title,
            summary=summary(spec.title, lines, page.series),
            caption=f"{spec.caption}{_spike_note(lines)}".strip(),
            lines=(*extra, *lines),
            unit=spec.unit,
            log=log_choice(values, spec.log),
            bounds=spec.bounds,
            group=group,
            x=x,
        ),
    )


def _lines(
    page: ChartPage, name: str, label: str, spec: LineSpec, series: Series, color: int
) -> list[Line]:
    page.series[name] = series
    marked = spikes(series) if spec.spikes else []
    drawn = tuple((series.steps[i], series.values[i]) for i in marked)
    if not spec.trend or len(series.values) < 2 * SMOOTHING_WINDOW:
        style: Style = "points" if spec.sparse else "line"
        return [Line(name, label, color, style, drawn)]
    trend = f"{name} mean of {SMOOTHING_WINDOW}"
    page.series[trend] = smoothed(series)
    return [
        Line(name, f"{label}, each step", color, "faint", drawn),
        Line(trend, f"{label}, mean of {SMOOTHING_WINDOW} steps", color),
    ]


def log_choice(values: Sequence[float], wanted: bool) -> Literal["off", "switch", "on"]:
    """A logarithmic axis needs positive values, and is worth a switch if they span enough."""
    positive = [value for value in values if value > 0]
    if not positive or min(values) < 0:
        return "off"
    if wanted:
        return "on"
    return "switch" if max(positive) / min(positive) >= LOG_SPAN else "off"


def summary(title: str, lines: Sequence[Line], series: Mapping[str, Series]) -> str:
    """What the chart shows, for a screen reader."""
    parts = []
    for line in lines:
        one = series[line.key]
        known = [(x, y) for x, y in zip(one.steps, one.values, strict=True) if math.isfinite(y)]
        if known and line.style != "faint":
            (first, start), (last, end) = known[0], known[-1]
            parts.append(f"{line.label} from {start:.4g} at {first:g} to {end:.4g} at {last:g}")
    return f"{title}: {'; '.join(parts)}"


def _spike_note(lines: Sequence[Line]) -> str:
    count = sum(len(line.spikes) for line in lines)
    if not count:
        return ""
    verb = "value is marked as a spike" if count == 1 else "values are marked as spikes"
    rule = f"robust z-score above {SPIKE_Z:g} among the {SPIKE_WINDOW} values around"
    return f" {count} {verb}: {rule}."
