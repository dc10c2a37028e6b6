"""Commands that check layouts and benchmarks and list keys; `routes_commands` is one more."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rltrain.cli import routes_commands, step_commands
from rltrain.cli.parameters import listed
from rltrain.cli.weight_commands import ignore_import_warnings

commands = typer.Typer()
PANEL = "Check and look up"
commands.add_typer(
    routes_commands.commands,
    name="routes",
    **listed("rltrain routes inspect routes.safetensors", panel=PANEL),
)
commands.add_typer(
    step_commands.commands,
    name="step",
    **listed("rltrain step replay RUN/steps/step-000012", panel=PANEL),
)
bench = typer.Typer()
commands.add_typer(
    bench, name="bench", **listed("rltrain bench compare old.json new.json", panel=PANEL)
)


@commands.command(**listed("rltrain verify --only 'cp=2 pp=2'", panel=PANEL))
def verify(
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Every layout with all that it allows, on all models.",
        ),
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Rows whose name has it, as in 'cp=2 pp=2'.")
    ] = "",
    models: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Default: the first, with --full all."),
    ] = None,
    bf16: Annotated[
        bool,
        typer.Option("--bf16", help="In bf16, against one rank in fp32 on the same routes."),
    ] = False,
) -> int:
    """Compare every parallel layout with one rank, on this machine."""
    ignore_import_warnings()
    from rltrain.verification.verify_command import verify_layouts

    return verify_layouts(full=full, only=only, models=models, bf16=bf16)


@bench.callback()
def about_bench() -> None:
    """Compare results of benchmarks/."""


@bench.command(**listed("rltrain bench compare old.json new.json"))
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A result, or a folder of them.")],
    new: Annotated[Path, typer.Argument(metavar="NEW")],
) -> int:
    """Say what became worse between two results; the exit status is 1 if something did."""
    from rltrain.cli.bench_command import compare

    return compare(old, new)


@commands.command(**listed("rltrain keys checkpoint", panel=PANEL))
def keys(
    word: Annotated[str, typer.Argument(metavar="WORD", help="In the names of keys.")] = "",
) -> int:
    """List configuration keys with their types, defaults and meaning."""
    from rltrain.config.reference import keys, show

    matching = [key for key in keys() if word in key.name]
    for key in matching:
        sys.stdout.write(f"{key.name}={show(key.default)}  ({key.type})\n")
        if key.doc:
            sys.stdout.write(f"    {' '.join(key.doc.split())}\n")
    if not matching:
        raise ValueError(f"no key has {word!r} in its name; rltrain keys lists all of them")
    return 0


@commands.command(**listed("rltrain explain RL1001", panel=PANEL))
def explain(
    codes: Annotated[
        list[str] | None,
        typer.Argument(metavar="CODE", help="At the end of an error. Default: list all."),
    ] = None,
) -> int:
    """Show what an error code means, what to do, and how to check it."""
    from rltrain.config.error_codes import explain

    sys.stdout.write(explain(codes or ()))
    return 0
