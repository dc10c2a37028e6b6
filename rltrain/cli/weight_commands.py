"""Commands that turn checkpoints into Hugging Face folders and back."""

import os
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer

from rltrain.cli.parameters import listed

commands = typer.Typer()
PANEL = "Weights"

Out = Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist.")]
MaxFile = Annotated[
    str,
    typer.Option(metavar="SIZE", help="What a file and the memory hold at most, as in 512MiB."),
]


@commands.command(
    "export", **listed("rltrain export outputs/2026-01-02_03-04-05 my_model --step 20", panel=PANEL)
)
def export_weights(
    source_and_out: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE OUT",
            help="SOURCE: a run's folder, a checkpoint in it, or what import wrote; by default the "
            "newest run below outputs/. OUT: a folder that does not exist. Either may be a URL, "
            "such as s3://bucket/run.",
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="Of the run's checkpoint. Default: the newest.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights. Default: as they are stored."),
    ] = None,
    max_file: MaxFile = "1GiB",
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Open what can run any code, from wherever it says it is."),
    ] = False,
) -> int:
    """Write a checkpoint of a run, or an imported one, as a Hugging Face folder."""
    ignore_import_warnings()
    from rltrain.cli.convert_command import export_weights
    from rltrain.cli.find_run import find_run

    if len(source_and_out) > 2:
        raise ValueError(f"expected SOURCE and OUT, found {len(source_and_out)} folders")
    *named, out = source_and_out
    source = named[0] if named else str(find_run(None))
    return export_weights(source, out, step=step, dtype=dtype, max_file=max_file, trust=trust)


@commands.command("import", **listed("rltrain import /models/my-qwen3-moe imported", panel=PANEL))
def import_weights(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face folder.")],
    out: Out,
    max_file: MaxFile = "1GiB",
) -> int:
    """Write a Hugging Face folder as a checkpoint of Megatron's."""
    ignore_import_warnings()
    from rltrain.cli.convert_command import import_weights

    return import_weights(source, out, max_file=max_file)


def ignore_import_warnings() -> None:
    """Megatron's, about packages it can do without; in this process and in its ranks."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
    warnings.simplefilter("ignore", UserWarning)
