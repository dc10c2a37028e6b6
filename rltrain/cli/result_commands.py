"""Commands about runs that have started."""

from pathlib import Path
from typing import Annotated

import typer

from rltrain.cli.parameters import listed

commands = typer.Typer()
PANEL = "Look at runs"


@commands.command(**listed("rltrain report outputs/2026-01-02_03-04-05", panel=PANEL))
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> int:
    """Write the report of a run anew, from the files in its folder."""
    from rltrain.cli.report_command import report

    return report(run)


@commands.command(**listed("rltrain compare outputs/first outputs/second", panel=PANEL))
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The folders of two or more runs. The first counts as the baseline.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
) -> int:
    """Compare runs: curves together, differences of configuration, verdicts with intervals."""
    from rltrain.cli.compare_command import compare

    return compare(runs, output)


@commands.command(**listed("rltrain dashboard my-team/my-project", panel=PANEL))
def dashboard(
    project: Annotated[str, typer.Argument(metavar="ENTITY/PROJECT", help="Of wandb.")],
) -> int:
    """Save the dashboard as a view of a wandb project."""
    from rltrain.cli.report_command import dashboard

    return dashboard(project)
