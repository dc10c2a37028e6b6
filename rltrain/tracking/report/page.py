"""report.html: one page about one run, made from the files in its folder alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rltrain.planning.roofline import describe_bottleneck
from rltrain.tracking.catalogue import SECTIONS
from rltrain.tracking.gpus import GpuSample, timeline
from rltrain.tracking.metrics import lookup_metric
from rltrain.tracking.report.chart_specs import (
    LEARNING,
    MISMATCH,
    STEP_TIME,
    TIME,
    ChartSpec,
    LineSpec,
)
from rltrain.tracking.report.charts import ChartPage, Line, draw
from rltrain.tracking.report.frame import write_page
from rltrain.tracking.report.heatmaps import LAYER, add_layer_heatmaps, phase_chart
from rltrain.tracking.report.recipe_curve import RecipeOfRun, expected_curve, recipe_of
from rltrain.tracking.report.rollout_samples import evaluation_samples, read_rollouts
from rltrain.tracking.report.run_folder import RunFolder, at, read_run
from rltrain.tracking.report.series import Series, read_series
from rltrain.tracking.report.verdicts import verdicts

SECTIONS_OF_PAGE = ("learning", "mismatch", "time")
MAX_LISTED_LAYERS = 8
MOST_NODES = 8
"""Of a chart with a line for each node."""


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` anew and return its path.

    Raises:
        ValueError: when there is no run folder, or a file in it cannot be read.
    """
    run = read_run(run_dir)
    return write_page(run_dir / "report.html", "report.html.j2", _report(run))


def _report(run: RunFolder) -> dict[str, Any]:
    """What the template of a run's report shows."""
    series = read_series(run.rows)
    recipe = recipe_of(run)
    page, curve_note = charts_of(run, series, recipe)
    rollouts, rollouts_note = read_rollouts(run.path / "rollouts.jsonl")
    evaluations, evaluations_note = evaluation_samples(run.samples)
    metrics = last_values(run.rows, page)
    replay = replay_mode(run.config)
    return {
        "header": header(run),
        "outcome": run.outcome,
        "notes": [*run.notes, *_length_notes(run)],
        "tiles": verdicts(run.rows, replay),
        "replay": replay,
        "recipe": recipe,
        "sections": {name: page.sections.get(name, []) for name in SECTIONS_OF_PAGE},
        "curve_note": curve_note,
        "speed": describe_bottleneck(run.rows, run.gpus[0].name if run.gpus else None),
        "evaluations": evaluations,
        "evaluations_note": evaluations_note,
        "has_rollouts": bool(rollouts),
        "rollouts_note": rollouts_note,
        "invariants": run.invariants,
        "metrics": metrics,
        "versions": run.versions,
        "config": yaml.safe_dump(dict(run.config), sort_keys=False),
        "data": {**page.data(), "rollouts": rollouts, "resumed": _resumed(run)},
    }


def charts_of(
    run: RunFolder, series: Mapping[str, Series], recipe: RecipeOfRun | None
) -> tuple[ChartPage, str]:
    """Every chart of a run, and a sentence about the expected curve of its recipe."""
    page = ChartPage()
    curves, curve_note = expected_curve(recipe) if recipe else ({}, "")
    if "eval/accuracy" not in series:
        curves, curve_note = {}, ""
    page.series |= curves
    expected = [Line(key, f"{recipe.name}, expected", 0, "expected") for key in curves if recipe]
    for index, spec in enumerate(LEARNING):
        draw(page, "learning", spec, series, expected if index == 0 else ())
    for spec in MISMATCH:
        draw(page, "mismatch", spec, series)
    add_layer_heatmaps(page, "mismatch", series)
    page.add("time", phase_chart(page, series))
    for spec in (*((STEP_TIME,) if "time" not in page.sections else ()), *TIME):
        draw(page, "time", spec, series)
    _add_gpu_charts(page, run.gpus)
    return page, curve_note


def _add_gpu_charts(page: ChartPage, samples: Sequence[GpuSample]) -> None:
    """Utilization and memory by NVML over the seconds of the run: mean and extremes of the GPUs."""
    busy = timeline(samples, lambda sample: sample.utilization)
    used = timeline(samples, lambda sample: sample.memory_gib)
    several = len({(sample.node, sample.gpu) for sample in samples}) > 1
    sampled = {
        "GPU mean": Series(busy.seconds, busy.mean),
        "GPU lowest": Series(busy.seconds, busy.lowest),
        "GPU fullest": Series(used.seconds, used.highest),
        "GPU emptiest": Series(used.seconds, used.lowest),
    }
    share = (LineSpec("GPU mean", "mean of the GPUs"), LineSpec("GPU lowest", "least busy GPU"))
    memory = (LineSpec("GPU fullest", "fullest GPU"), LineSpec("GPU emptiest", "emptiest GPU"))
    shown = 2 if several else 1
    nodes = sorted({sample.node for sample in samples})
    by_node = tuple(LineSpec(f"GPUs of {node}", node) for node in nodes[:MOST_NODES])
    for node in nodes[:MOST_NODES]:
        own = [sample for sample in samples if sample.node == node]
        line = timeline(own, lambda sample: sample.utilization)
        sampled[f"GPUs of {node}"] = Series(line.seconds, line.mean)
    for spec in (
        ChartSpec("Share of a second in which a kernel ran", share[:shown], unit="share"),
        *([ChartSpec("The same, mean of each node", by_node, unit="share")] * (len(nodes) > 1)),
        ChartSpec("GPU memory in use", memory[:shown], unit="GiB"),
    ):
        draw(page, "time", spec, sampled, group="seconds", x="second")


def replay_mode(config: Mapping[str, Any]) -> str:
    return str(at(config, "routing_replay.mode") or "off")


def header(run: RunFolder) -> dict[str, str]:
    config = run.config
    mode = replay_mode(config)
    replay = "without routing replay" if mode == "off" else f"with routing replay {mode.upper()}"
    tiny = at(config, "model.tiny")
    parallel = at(config, "policy.parallel")
    sizes = parallel.items() if isinstance(parallel, Mapping) else ()
    layout = [f"{name.upper()} {size}" for name, size in sizes if size not in (1, None)]
    return {
        "title": f"{_algorithm(config)} {replay}",
        "model": str(at(config, "model.path") or _tiny_model(tiny)),
        "steps": f"{run.rows[-1]['step'] if run.rows else 0} of {at(config, 'trainer.steps', '?')}",
        "seed": str(at(config, "trainer.seed", "?")),
        "batch": f"{at(config, 'trainer.prompts_per_step', '?')} prompts x "
        f"{at(config, 'algorithm.group_size', '?')} responses",
        "layout": ", ".join(layout) or "one rank",
        "folder": str(run.path),
    }


def _tiny_model(tiny: Any) -> str:
    if not isinstance(tiny, Mapping):
        return "?"
    layers, experts, top = (
        tiny.get(name, "?") for name in ("num_layers", "num_experts", "experts_per_token")
    )
    return f"tiny Qwen3-MoE, {layers} layers, {experts} experts, top {top}"


def _algorithm(config: Mapping[str, Any]) -> str:
    if at(config, "algorithm.type") != "rl":
        return str(at(config, "algorithm.type", "run")).upper()
    advantage, loss = (str(at(config, f"algorithm.{name}", "?")) for name in ("advantage", "loss"))
    names = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "rloo": "RLOO", "gae": "PPO"}
    named = names.get(advantage, advantage)
    return named if loss == "ppo" else f"{named}, loss {loss.upper()},"


def _length_notes(run: RunFolder) -> list[str]:
    steps = len([row for row in run.rows if row["step"] > 0])
    if not run.rows:
        return ["No step was logged."]
    return ["One step was logged, so that no chart has a line yet."] if steps == 1 else []


def _resumed(run: RunFolder) -> list[int]:
    """The steps after which the run was resumed."""
    text = str(run.versions.get("resumed_after_steps", ""))
    return [int(part) for part in text.split(",") if part.strip().isdigit()]


def last_values(
    rows: Sequence[Mapping[str, Any]], page: ChartPage
) -> list[tuple[str, list[dict[str, Any]]]]:
    """The last value of every metric, by section, in the catalogue's words.

    Their series go to the page, which draws one when it is asked for. Of metrics per layer the
    first ``MAX_LISTED_LAYERS`` layers are listed: a heatmap shows all.
    """
    entries = []
    for name, one in read_series(rows).items():
        layer = LAYER.fullmatch(name)
        if layer and int(layer[2]) > MAX_LISTED_LAYERS:
            continue
        page.listed[name] = one
        value = one.values[-1]
        metric = lookup_metric(name)
        entries.append(
            {
                "name": name,
                "step": int(one.steps[-1]),
                "value": value if math.isfinite(value) else None,
                "metric": metric,
                "section": metric.section if metric else "not in the catalogue",
            }
        )
    sections = (*SECTIONS, "not in the catalogue")
    grouped = ((s, [e for e in entries if e["section"] == s]) for s in sections)
    return [(section, listed) for section, listed in grouped if listed]
