"""``rltrain step``: what there is to do with a step that a run has kept."""

from pathlib import Path
from typing import Annotated

import typer

from rltrain.cli.parameters import listed
from rltrain.cli.weight_commands import ignore_import_warnings

commands = typer.Typer()


@commands.callback()
def about() -> None:
    """Run a step again whose numbers were not finite."""
    ignore_import_warnings()


@commands.command(**listed("rltrain step replay outputs/2026-01-02_03-04-05/steps/step-000012"))
def replay(
    step: Annotated[
        Path, typer.Argument(metavar="FILE", help="What an error names: RUN/steps/step-000012.")
    ],
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The run's folder. Default: the one around FILE."),
    ] = None,
) -> int:
    """Score and update on a kept batch alone; the exit status is 1 if a number is not finite."""
    from rltrain.controller.step_replay import replay_step

    return replay_step(step, run)
