"""Commands about runs that have started."""

from pathlib import Path
from typing import Annotated

import typer

from rltrain.cli.parameters import listed

commands = typer.Typer()
PANEL = "Look at runs"


RunFolder = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="The folder of a run. Default: the newest below outputs/."),
]


@commands.command(**listed("rltrain report outputs/2026-01-02_03-04-05", panel=PANEL))
def report(run: RunFolder = None) -> int:
    """Write the report of a run anew, from the files in its folder."""
    from rltrain.cli.find_run import find_run
    from rltrain.cli.report_command import report

    return report(find_run(run))


@commands.command(**listed("rltrain compare outputs/first outputs/second", panel=PANEL))
def compare(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="The folders of two or more runs. The first counts as the baseline. Default: the "
            "two newest below outputs/.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
) -> int:
    """Compare runs: curves together, differences of configuration, verdicts with intervals."""
    from rltrain.cli.compare_command import compare
    from rltrain.cli.find_run import find_run, newest_runs

    return compare([find_run(run) for run in runs] if runs else newest_runs(2), output)


@commands.command(
    **listed(
        "rltrain logs",
        "rltrain logs engine-0 --follow",
        "rltrain logs outputs/2026-01-02_03-04-05 --rank 3",
        "rltrain logs outputs/2026-01-02_03-04-05 --errors",
        panel=PANEL,
    )
)
def logs(
    run_and_who: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN WHO",
            help="The folder of a run, by default the newest below outputs/; and a log to print, "
            "such as engine-0. Without WHO the logs are listed.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what is written, until the run ends.")
    ] = False,
    errors: Annotated[
        bool, typer.Option("--errors", "-e", help="Show the last error in each log.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of the policy, whatever node it is on; with WHO=critic or WHO=engine, of those.",
        ),
    ] = None,
) -> int:
    """Show the logs of a run's workers and engines."""
    from rltrain.cli.logs_command import logs

    return logs(run_and_who or [], with_errors=errors, with_new_lines=follow, rank=rank)


@commands.command(**listed("rltrain dashboard my-team/my-project", panel=PANEL))
def dashboard(
    project: Annotated[str, typer.Argument(metavar="ENTITY/PROJECT", help="Of wandb.")],
) -> int:
    """Save the dashboard as a view of a wandb project."""
    from rltrain.cli.report_command import dashboard

    return dashboard(project)
