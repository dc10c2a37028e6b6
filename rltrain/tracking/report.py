"""report.html: one self-contained page about one run, made from the files in its folder alone.

Reads config.yaml, versions.json, outcome.json, invariants.json, metrics.jsonl, samples.jsonl and
gpus.csv. Any of them may be missing, for example after a run that died early. The page loads
nothing from the network.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rltrain.planning.roofline import describe_bottleneck
from rltrain.tracking.catalogue import SECTIONS
from rltrain.tracking.charts import Line, heatmap, line_chart, stacked_bars
from rltrain.tracking.gpus import GpuSample, read_gpus, timeline
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.metrics import find_metric
from rltrain.tracking.verdicts import Rows, column, scientific, verdicts

SMOOTHING_WINDOW = 9
MAX_COLUMNS = 100
LAYER_PREFIX = "routing/overlap/layer_"


@dataclass(frozen=True)
class Figure:
    """A chart with its legend: (CSS class, label, last value) per line."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str, str], ...] = ()


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` anew and return its path.

    Raises:
        ValueError: when there is no run folder, or a file in it cannot be read.
    """
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is no run folder: expected a folder with metrics.jsonl in it")
    rows = read_jsonl(run_dir / "metrics.jsonl")
    samples = read_jsonl(run_dir / "samples.jsonl")
    config_file = run_dir / "config.yaml"
    config = yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    gpus = read_gpus(run_dir / "gpus.csv")
    replay = _at(config, "routing_replay.mode", "off")
    page = _template().render(
        header=_header(config, rows),
        config=yaml.safe_dump(config, sort_keys=False),
        versions=_read_json(run_dir / "versions.json"),
        outcome=_read_json(run_dir / "outcome.json"),
        tiles=verdicts(rows, replay),
        invariants=_read_json(run_dir / "invariants.json"),
        learning=_learning(rows),
        mismatch=_mismatch(rows),
        overlap=_overlap(rows),
        times=_times(rows),
        speed=describe_bottleneck(rows, gpus[0].name if gpus else None),
        gpus=_gpus(gpus),
        samples=_by_step(samples),
        last_values=_last_values(rows),
        replay=replay,
    )
    path = run_dir / "report.html"
    beside = path.with_name("report.html.partial")
    beside.write_text(page, encoding="utf-8")
    os.replace(beside, path)
    return path


def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    return environment.get_template("report.html.j2")


def format_number(value: float | None) -> str:
    """A value the way a person writes it: whole numbers whole, others with four digits."""
    if value is None:
        return "not finite"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"


def percent(value: float) -> str:
    return f"{round(100 * value, 1):g}%"


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _at(config: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    """The value under a dotted key; ``default`` where a run of another version has no such key."""
    value: Any = config
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def _header(config: Mapping[str, Any], rows: Rows) -> dict[str, str]:
    algorithm = _algorithm(config)
    mode = _at(config, "routing_replay.mode", "off")
    replay = "without routing replay" if mode == "off" else f"with routing replay {mode.upper()}"
    tiny = _at(config, "model.tiny", {})
    made = (
        f"tiny Qwen3-MoE, {tiny['num_layers']} layers, {tiny['num_experts']} experts, "
        f"top {tiny['experts_per_token']}"
        if tiny
        else "?"
    )
    model = _at(config, "model.path") or made
    parallel = _at(config, "policy.parallel", {})
    layout = [f"{name.upper()} {size}" for name, size in parallel.items() if size not in (1, None)]
    steps = f"{rows[-1]['step'] if rows else 0} of {_at(config, 'trainer.steps', '?')}"
    return {
        "title": f"{algorithm} {replay}",
        "model": str(model),
        "steps": steps,
        "seed": str(_at(config, "trainer.seed", "?")),
        "batch": f"{_at(config, 'trainer.prompts_per_step', '?')} prompts x "
        f"{_at(config, 'algorithm.group_size', '?')} responses",
        "layout": ", ".join(layout) or "one rank",
    }


def _algorithm(config: Mapping[str, Any]) -> str:
    if _at(config, "algorithm.type") != "rl":
        return str(_at(config, "algorithm.type", "run")).upper()
    advantage, loss = (str(_at(config, f"algorithm.{name}", "?")) for name in ("advantage", "loss"))
    names = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "rloo": "RLOO", "gae": "PPO"}
    named = names.get(advantage, advantage)
    return named if loss == "ppo" else f"{named}, loss {loss.upper()},"


def _figure(
    title: str,
    rows: Rows,
    named: Sequence[tuple[str, str, str]],
    write: Callable[[float], str],
    **options: Any,
) -> Figure | None:
    """A line chart of (metric, label, CSS class); None where no metric has a value."""
    lines, legend = [], []
    for name, label, style in named:
        steps, values = column(rows, name)
        if steps:
            sparse = len(steps) < len(rows) or len(steps) <= 20
            lines.append(Line(label, steps, values, style, marked=sparse))
            legend.append((style, label, write(values[-1])))
    if options.get("log_scale") and not any(y > 0 for line in lines for y in line.ys):
        options["log_scale"] = False
    return Figure(title, line_chart(lines, write, **options), tuple(legend)) if lines else None


def _learning(rows: Rows) -> list[Figure]:
    accuracy = _figure(
        "Accuracy on held-out problems",
        rows,
        [("eval/accuracy", "correct answers", "series-a")],
        percent,
        bounds=(0, 1),
    )
    figures = [accuracy, _smoothed_figure("Mean reward", rows, "reward/mean")]
    figures.append(_smoothed_figure("Mean reward on held-out problems", rows, "eval/reward_mean"))
    figures.append(_smoothed_figure("Supervised loss", rows, "sft/loss"))
    held_out = [("eval/loss", "held-out problems", "series-a")]
    figures.append(_figure("Supervised loss on held-out problems", rows, held_out, format_number))
    return [figure for figure in figures if figure is not None]


def _smoothed_figure(title: str, rows: Rows, name: str) -> Figure | None:
    """The metric as it is, faint, under its centred mean."""
    steps, values = column(rows, name)
    if len(steps) < 2 * SMOOTHING_WINDOW:
        return _figure(title, rows, [(name, name, "series-a")], format_number)
    half = SMOOTHING_WINDOW // 2
    means = [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    lines = [
        Line("each step", steps, values, "series-a faint"),
        Line(f"mean of {SMOOTHING_WINDOW} steps", steps, means, "series-a"),
    ]
    legend = tuple((line.style, line.label, format_number(line.ys[-1])) for line in lines)
    return Figure(title, line_chart(lines, format_number), legend)


def _mismatch(rows: Rows) -> list[Figure]:
    def pair(title: str, name: str) -> Figure | None:
        named = [
            (f"mismatch_native/{name}", "native routing", "series-b"),
            (f"mismatch/{name}", "as trained", "series-a"),
        ]
        return _figure(title, rows, named, scientific, log_scale=True)

    figures = [
        pair("k3 over all response tokens", "k3"),
        pair("Median |difference| on flipped tokens", "abs_diff_median_flipped"),
    ]
    return [figure for figure in figures if figure is not None]


def _overlap(rows: Rows) -> Figure | None:
    sampled = [row for row in rows if any(name.startswith(LAYER_PREFIX) for name in row)]
    layers = sorted(
        {
            int(n.removeprefix(LAYER_PREFIX))
            for r in sampled
            for n in r
            if n.startswith(LAYER_PREFIX)
        }
    )
    if not layers:
        return None
    sampled = sampled[:: math.ceil(len(sampled) / MAX_COLUMNS)]
    values = [[row.get(f"{LAYER_PREFIX}{layer}") for row in sampled] for layer in layers]
    steps = [row["step"] for row in sampled]
    return Figure(
        "Share of experts that native routing also picks, by layer and step",
        heatmap([f"layer {layer}" for layer in layers], steps, values),
    )


def _times(rows: Rows) -> Figure | None:
    timed = [row for row in rows if row.get("time/step") is not None]
    names = {n for row in timed for n in row if n.startswith("time/") and n != "time/step"}
    if not names:
        return None
    seconds = {
        name.removeprefix("time/"): [float(row.get(name) or 0.0) for row in timed] for name in names
    }
    order = sorted(seconds, key=lambda name: (name == "other", -sum(seconds[name])))
    total = sum(sum(values) for values in seconds.values()) or 1.0
    legend = tuple(
        (
            f"phase-{name}",
            name.replace("_", " "),
            f"{sum(seconds[name]) / len(timed):.2f} s, {percent(sum(seconds[name]) / total)}",
        )
        for name in order
    )
    steps = [row["step"] for row in timed]
    svg = stacked_bars(steps, {name: seconds[name] for name in order})
    return Figure("Seconds a step, by phase", svg, legend)


def _gpus(samples: Sequence[GpuSample]) -> list[Figure]:
    """Utilization and memory: of one GPU, or the mean and the extremes of several."""
    busy = timeline(samples, lambda sample: sample.utilization)
    used = timeline(samples, lambda sample: sample.memory_gib)
    if not busy.seconds and not used.seconds:
        return []
    shown = min(2, len({sample.gpu for sample in samples}))
    shares = [
        Line("mean of the GPUs", busy.seconds, busy.mean, "series-a"),
        Line("least busy GPU", busy.seconds, busy.lowest, "series-b"),
    ][:shown]
    memory = [
        Line("fullest GPU", used.seconds, used.highest, "series-a"),
        Line("emptiest GPU", used.seconds, used.lowest, "series-b"),
    ][:shown]
    averages = tuple(
        (line.style, line.label, f"{percent(statistics.fmean(line.ys))} on average")
        for line in shares
        if line.ys
    )
    peaks = tuple(
        (line.style, line.label, f"{max(line.ys):.3g} GiB at most") for line in memory if line.ys
    )
    return [
        Figure(
            "Share of a second in which a kernel ran",
            line_chart(shares, percent, bounds=(0, 1), over="second"),
            averages,
        ),
        Figure("GPU memory in use, GiB", line_chart(memory, format_number, over="second"), peaks),
    ]


def _by_step(samples: Rows) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """Samples of each evaluation, the newest first."""
    steps = sorted({row["step"] for row in samples}, reverse=True)
    return [(step, [row for row in samples if row["step"] == step]) for step in steps]


def _last_values(rows: Rows) -> list[tuple[str, list[dict[str, Any]]]]:
    """The last value of every metric, by section, in the catalogue's words."""
    last = {name: (row["step"], row[name]) for row in rows for name in row if name != "step"}
    entries = [
        {"name": name, "step": step, "value": value, "metric": find_metric(name)}
        for name, (step, value) in last.items()
    ]
    grouped = ((s, [e for e in entries if e["metric"].section == s]) for s in SECTIONS)
    return [(section, last_values) for section, last_values in grouped if last_values]
