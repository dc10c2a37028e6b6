"""compare.html: the curves of several runs together, their differences and verdicts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rltrain.tracking.report.chart_specs import LEARNING, MISMATCH, STEP_TIME, TIME, ChartSpec
from rltrain.tracking.report.charts import Chart, ChartPage, Line, Style, log_choice, summary
from rltrain.tracking.report.compare import (
    ComparedRun,
    compare_runs,
    config_differences,
    notes_of,
    read_runs,
)
from rltrain.tracking.report.frame import write_page
from rltrain.tracking.report.heatmaps import LAYER
from rltrain.tracking.report.page import MAX_LISTED_LAYERS, SECTIONS_OF_PAGE, header
from rltrain.tracking.report.series import SMOOTHING_WINDOW, smoothed


def write_comparison(folders: Sequence[Path], output: Path) -> tuple[Path, list[ComparedRun]]:
    """Write the page about these runs and return its path, and the runs.

    Raises:
        ValueError: from `read_runs`.
    """
    runs = read_runs(folders)
    changes = config_differences(runs)
    page = ChartPage()
    for section, specs in zip(
        SECTIONS_OF_PAGE, (LEARNING, MISMATCH, (STEP_TIME, *TIME)), strict=True
    ):
        for spec in specs:
            _add_charts(page, section, spec, runs)
    metrics = _last_values(page, runs)
    values = {
        "runs": [_facts(run) for run in runs],
        "notes": notes_of(runs, changes),
        "comparisons": compare_runs(runs),
        "differences": {key: [_text(value) for value in row] for key, row in changes.items()},
        "sections": {name: page.sections.get(name, []) for name in SECTIONS_OF_PAGE},
        "metrics": metrics,
        "data": {
            **page.data(),
            "metric_lines": {
                name: [asdict(line) for line in _lines(name, runs)] for name, _ in metrics
            },
        },
    }
    return write_page(output, "compare.html.j2", values), runs


def _add_charts(
    page: ChartPage, section: str, spec: ChartSpec, runs: Sequence[ComparedRun]
) -> None:
    """A chart of each metric of ``spec`` that two runs have, a line per run."""
    names = {name for run in runs for name in run.series}
    matched = [(line, *match) for line in spec.lines for match in line.matching(names)]
    for line, name, label in matched:
        having = [(i, run, run.series[name]) for i, run in enumerate(runs) if name in run.series]
        values = [value for _, _, series in having for value in series.finite]
        if len(having) < 2 or not values or (spec.nonzero and not any(values)):
            continue
        trend = line.trend and all(len(s.steps) >= 2 * SMOOTHING_WINDOW for _, _, s in having)
        style: Style = "points" if line.sparse else "line"
        lines = tuple(Line(f"{name} of {i}", run.label, i, style) for i, run, _ in having)
        for i, _, series in having:
            page.series[f"{name} of {i}"] = smoothed(series) if trend else series
        title = spec.title if len(matched) == 1 else f"{spec.title}: {label}"
        page.add(
            section,
            Chart(
                id=page.next_id(),
                kind="lines",
                title=title,
                summary=summary(title, lines, page.series),
                caption=f"Mean of {SMOOTHING_WINDOW} steps." if trend else "",
                lines=lines,
                unit=spec.unit,
                log=log_choice(values, spec.log),
                bounds=spec.bounds,
            ),
        )


def _lines(name: str, runs: Sequence[ComparedRun]) -> list[Line]:
    return [
        Line(f"{name} listed of {i}", run.label, i)
        for i, run in enumerate(runs)
        if name in run.series
    ]


def _last_values(
    page: ChartPage, runs: Sequence[ComparedRun]
) -> list[tuple[str, list[float | None]]]:
    """Every metric with its last value in each run; its series go to the page."""
    rows = []
    for name in sorted({name for run in runs for name in run.series}):
        layer = LAYER.fullmatch(name)
        if layer and int(layer[2]) > MAX_LISTED_LAYERS:
            continue
        values: list[float | None] = []
        for i, run in enumerate(runs):
            one = run.series.get(name)
            if one:
                page.listed[f"{name} listed of {i}"] = one
            known = one.finite if one else []
            values.append(known[-1] if known else None)
        rows.append((name, values))
    return rows


def _facts(run: ComparedRun) -> dict[str, str]:
    facts = header(run.run)
    return {
        "label": run.label,
        "title": facts["title"],
        "steps": facts["steps"],
        "seed": facts["seed"],
        "machine": str(run.run.versions.get("machine", "?")),
        "outcome": str(run.run.outcome.get("state", "not ended")),
        "folder": facts["folder"],
    }


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
