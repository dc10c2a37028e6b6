"""What commands have in common: their parameters, and how a command is listed in the help."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from rltrain.cli.completion import complete_override

OVERRIDES = typer.Argument(
    metavar="RECIPE.yaml a.b=c ...",
    help="A recipe: a file of yours or +recipe=NAME. Then groups and keys: Hydra overrides.",
    autocompletion=complete_override,
    show_default=False,
)
Overrides = Annotated[list[str], OVERRIDES]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="FOLDER",
        help="More group files, for example FOLDER/recipe/mine.yaml.",
        show_default=False,
        is_eager=True,  # --help lists the recipes in it
    ),
]


def listed(*examples: str, panel: str | None = None) -> dict[str, Any]:
    """Keyword arguments of ``Typer.command``: the examples below the command's own help, and the
    panel of `rltrain --help` that lists it."""
    lines = "\n\n".join(f"[cyan]{escape(example)}[/cyan]" for example in examples)
    title = "Example" if len(examples) == 1 else "Examples"
    return {"rich_help_panel": panel, "epilog": f"[dim]{title}:[/dim]\n\n{lines}"}
