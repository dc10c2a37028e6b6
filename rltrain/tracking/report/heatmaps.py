"""Charts of a step by layers, and of a step by phases, binned on steps."""

import math
import re
from collections.abc import Mapping

from rltrain.tracking.metrics import lookup_metric
from rltrain.tracking.report.charts import Chart, ChartPage, Line
from rltrain.tracking.report.series import Series, binned, pack

LAYER = re.compile(r"(.+)/layer_(\d+)")
MAX_COLUMNS = 200
MAX_BARS = 150
PHASES = (
    *("generate", "update", "old_logprobs", "weight_sync", "eval", "native_logprobs", "reward"),
    *("ref_logprobs", "critic_update", "checkpoint"),
)
"""Their place is their colour, the same in every report."""
TITLES = {
    "routing/overlap": "Experts that native routing also picks",
    "routing/gate_mass": "Gate mass of the experts used",
    "routing/wide_flip_fraction": "Flips wider than rounding explains",
    "routing/flip_noise": "Noise between engine and trainer in the router's logits",
    "routing/load_max": "Load of the most loaded expert",
}


def add_layer_heatmaps(page: ChartPage, section: str, series: Mapping[str, Series]) -> None:
    """A heatmap of steps by layers for each metric that is logged per layer."""
    families: dict[str, dict[int, Series]] = {}
    for name, one in series.items():
        if (match := LAYER.fullmatch(name)) and one.finite:
            families.setdefault(match[1], {})[int(match[2])] = one
    end = max((int(one.steps[-1]) for one in series.values()), default=0)
    for name, layers in sorted(families.items(), key=lambda item: _place(item[0])):
        page.add(section, _heatmap(page.next_id(), name, layers, end))


def _place(family: str) -> tuple[int, str]:
    known = list(TITLES)
    return known.index(family) if family in known else len(known), family


def _heatmap(chart_id: str, name: str, layers: Mapping[int, Series], last: int) -> Chart:
    """Columns reach to the ``last`` step of the run."""
    measured = sorted({int(step) for one in layers.values() for step in one.steps})
    first = measured[0]
    width = math.ceil((last - first + 1) / MAX_COLUMNS)
    count = (last - first) // width + 1
    order = sorted(layers)
    rows = [held(binned(layers[layer], first, width, count)) for layer in order]
    known = [value for row in rows for value in row if math.isfinite(value)]
    metric = lookup_metric(name) or lookup_metric(f"{name}/layer_0")
    formula = f": {metric.formula}" if metric else ""
    caption = f"{name}{formula}. Measured in {len(measured)} steps. "
    if min(known) == max(known):
        caption += f"Every value is {known[0]:.4g}. "
    if width > 1:
        caption += f"A column is the mean of {width} steps. "
    if len(measured) < count:
        caption += "A measurement fills the columns up to the next one."
    title = TITLES.get(name, name)
    return Chart(
        id=chart_id,
        kind="heatmap",
        title=f"{title}, by layer",
        summary=f"{title}: {len(order)} layers, from {min(known):.4g} to {max(known):.4g}",
        caption=caption.strip(),
        heatmap={
            "first": first,
            "width": width,
            "columns": count,
            "layers": order,
            "low": min(known),
            "high": max(known),
            "values": pack([value for row in rows for value in row]),
        },
    )


def held(values: list[float]) -> list[float]:
    """Each gap takes the value before it, as a metric that is measured in some steps."""
    filled, last = [], math.nan
    for value in values:
        last = value if math.isfinite(value) else last
        filled.append(last)
    return filled


def phase_chart(page: ChartPage, series: Mapping[str, Series]) -> Chart | None:
    """Seconds of each phase, stacked: a bar per step, or per bin of steps in a long run."""
    names = [n for n in series if n.startswith("time/") and n != "time/step" and series[n].finite]
    if not names or "time/step" not in series:
        return None
    steps = [int(step) for step in series["time/step"].steps]
    first, last = steps[0], steps[-1]
    width = math.ceil((last - first + 1) / MAX_BARS)
    total = sum(sum(series[name].finite) for name in names)
    lines = []
    for name in sorted(names, key=lambda n: (n == "time/other", -sum(series[n].finite))):
        phase = name.removeprefix("time/")
        key = f"{name} per bar"
        page.series[key] = _bars(series[name], steps, width)
        share = sum(series[name].finite) / total if total else 0.0
        label = f"{phase.replace('_', ' ')} {100 * share:.3g} %"
        color = PHASES.index(phase) if phase in PHASES else len(PHASES) + (phase == "other")
        lines.append(Line(key, label, color))
    caption = "Phases do not overlap. With what no phase covers they sum to the step."
    if width > 1:
        caption += f" A bar is the mean of {width} steps."
    shares = ", ".join(line.label for line in lines)
    return Chart(
        id=page.next_id(),
        kind="stack",
        title="Seconds per step, by phase",
        summary=f"Seconds per step by phase: {shares}",
        caption=caption,
        lines=tuple(lines),
        unit="seconds",
        wide=True,
    )


def _bars(series: Series, steps: list[int], width: int) -> Series:
    """Mean seconds over all steps of a bin; a step that did not have the phase counts as 0."""
    logged = {
        step: value
        for step, value in zip(series.steps, series.values, strict=True)
        if math.isfinite(value)
    }
    whole = Series(list(steps), [logged.get(step, 0.0) for step in steps])
    means = binned(whole, steps[0], width, (steps[-1] - steps[0]) // width + 1)
    kept = [i for i, mean in enumerate(means) if math.isfinite(mean)]
    return Series([steps[0] + i * width for i in kept], [means[i] for i in kept])
