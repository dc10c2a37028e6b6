"""Weights & Biases: the run, its step axis, tables, alerts and the dashboard.

Plain ``wandb`` names the step axis and summary of a metric, and logs charts and tables. Its live
page always groups metrics by the part of the name before the slash. So the sections of
``tracking.dashboard`` appear as custom charts when a run finishes, and as a saved view of the
project by ``save_dashboard``, which needs ``wandb-workspaces`` and a server.

Online, steps that a resumed run repeats appear twice on the step axis: wandb cannot delete what was
sent. metrics.jsonl has them once.
"""

import logging
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import wandb

from rltrain.config.durable import write_durably
from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.backends import Rows, State
from rltrain.tracking.catalogue import METRICS
from rltrain.tracking.dashboard import DASHBOARD, Panel, panel_lines
from rltrain.tracking.wandb_mode import Mode, choose_mode

logger = logging.getLogger(__name__)

STEP = "trainer/step"
EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 255}
"""wandb takes 255 for a run that was killed."""


def start(
    run_dir: Path, tracking: TrackingConfig, config: Mapping[str, Any], first_step: int
) -> "WandbRun":
    """Begin a run, or go on with the one whose id is in ``<run_dir>/wandb_id``."""
    # Tables are staged here until they are synced; by default that is the home folder.
    os.environ.setdefault("WANDB_DATA_DIR", str(run_dir.resolve() / "wandb"))
    mode = choose_mode(tracking.wandb, os.environ)
    resumed = first_step > 0
    try:
        run = _init(run_dir, tracking, config, mode, resumed=resumed)
    except wandb.errors.CommError as error:
        if mode != "online":
            raise
        logger.warning("wandb cannot be reached (%s): this run goes on offline", error)
        mode = "offline"
        run = _init(run_dir, tracking, config, mode, resumed=resumed)
    write_durably(run_dir / "wandb_id", run.id)
    logger.info("wandb is %s, run %s", mode, run.url if mode == "online" else run.id)
    _define_metrics(run)
    return WandbRun(run)


class WandbRun:
    """See `rltrain.tracking.backends.Backend`."""

    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def samples(self, step: int, table: str, rows: Rows) -> None:
        """A table of its own for every step; wandb shows them with a step slider."""
        columns = ["step", *rows[0]]
        data = [[step, *(row[name] for name in columns[1:])] for row in rows]
        self._run.log({STEP: step, table: wandb.Table(columns=columns, data=data)})

    def alert(self, step: int, kind: str, text: str) -> None:
        self._run.alert(title=kind.replace("_", " "), text=text, level="WARN", wait_duration=1)

    def finish(self, rows: Rows, state: State) -> None:
        """Draw the dashboard from the rows of metrics.jsonl and close the run."""
        charts = {
            f"{section}/{panel.title}": chart
            for section, panels in DASHBOARD.items()
            for panel in panels
            if (chart := _chart(panel, rows)) is not None
        }
        if charts:
            self._run.log(charts)
        self._run.finish(exit_code=EXIT_CODES[state])


def _init(
    run_dir: Path,
    tracking: TrackingConfig,
    config: Mapping[str, Any],
    mode: Mode,
    *,
    resumed: bool,
) -> wandb.Run:
    id_file = run_dir / "wandb_id"
    known = id_file.read_text(encoding="utf-8") if resumed and id_file.is_file() else ""
    return wandb.init(
        project=tracking.project,
        name=tracking.name,
        dir=run_dir,
        config=dict(config),
        mode=mode,
        id=known or None,
        resume="allow" if known and mode == "online" else None,
        reinit="create_new",
        settings=wandb.Settings(
            console="off",  # our progress line and wandb's capture of the terminal would fight
            silent=True,
            x_disable_meta=True,  # the whole command line, which may hold secrets
            disable_git=True,  # a remote's URL keeps a token that stands in the user's place
        ),
    )


def _define_metrics(run: wandb.Run) -> None:
    run.define_metric(STEP, hidden=True)
    best = {"higher": "last,max", "lower": "last,min", "neither": "last"}
    for metric in METRICS:
        run.define_metric(metric.glob, step_metric=STEP, summary=best[metric.better])


def _chart(panel: Panel, rows: Rows) -> Any | None:
    lines = panel_lines(panel, rows)
    if not lines:
        return None
    return wandb.plot.line_series(
        xs=[steps for steps, _ in lines.values()],
        ys=[values for _, values in lines.values()],
        keys=list(lines),
        title=panel.title,
        xname="step",
        split_table=True,
    )


def dashboard_view(entity: str, project: str) -> Any:
    """The dashboard as a ``wandb_workspaces`` workspace, not yet saved."""
    try:
        reports = import_module("wandb_workspaces.reports.v2")
        workspaces = import_module("wandb_workspaces.workspaces")
    except ModuleNotFoundError as error:
        raise ValueError(
            "the saved wandb view needs wandb-workspaces: pip install wandb-workspaces"
        ) from error

    def plot(panel: Panel) -> Any:
        family = next((name for name in panel.metrics if "{" in name), None)
        lines = {"metric_regex": family.split("{")[0] + ".*"} if family else {"y": panel.metrics}
        return reports.LinePlot(title=panel.title, x=STEP, log_y=panel.log_scale, **lines)

    sections = [
        workspaces.Section(name=name, panels=[plot(panel) for panel in panels], is_open=True)
        for name, panels in DASHBOARD.items()
    ]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="rltrain",
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
    )


def save_dashboard(entity: str, project: str) -> str:
    """Save the dashboard as a new view of the project on the wandb server; returns its URL."""
    return str(dashboard_view(entity, project).save().url)
