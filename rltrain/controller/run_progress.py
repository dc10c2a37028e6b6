"""What a person sees of a run: a live panel in a terminal, and log lines in a file or a pipe."""

import os
from pathlib import Path

from rich.console import Console

from rltrain.config import Config
from rltrain.controller.evaluation import is_due
from rltrain.controller.run_loop import is_checkpoint_due
from rltrain.controller.weight_sync import is_sync_due
from rltrain.tracking.eta import Due, Eta
from rltrain.tracking.panel import LivePanel
from rltrain.tracking.progress import ProgressLines, RunProgress


def run_progress(
    config: Config, *, has_held_out: bool, console: Console | None = None
) -> RunProgress:
    """Close it when the run has ended.

    Args:
        has_held_out: whether there is something to evaluate on
        console: standard output where it is None
    """
    console = console or Console()
    trainer = config.trainer
    due: dict[str, Due] = {
        "eval": lambda step: has_held_out and is_due(trainer, step),
        "checkpoint": lambda step: is_checkpoint_due(config, step),
    }
    if config.algorithm.type == "rl":
        evaluates = due["eval"]
        due["weight_sync"] = lambda step: is_sync_due(trainer, step, evaluates=evaluates(step))
    eta = Eta(trainer.steps, due)
    if not console.is_terminal or console.is_dumb_terminal:
        return ProgressLines(trainer.steps, eta)
    folder = os.path.relpath(trainer.output_dir)
    is_below = not folder.startswith(os.pardir)
    title = f"rltrain  {folder if is_below else Path(trainer.output_dir)}"
    return LivePanel(console, title, trainer.steps, eta)
