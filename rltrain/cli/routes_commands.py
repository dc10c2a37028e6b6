"""``rltrain routes``: its subcommands, which work without a training run.

Each imports its module when it runs: only some need Megatron, Ray or vLLM.
"""

from typing import Annotated, Literal

import typer

from rltrain.cli.parameters import listed
from rltrain.cli.weight_commands import ignore_import_warnings

commands = typer.Typer()

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face folder, or tiny:qwen3 and the like, with seeded weights.",
    ),
]
RoutesFile = Annotated[str, typer.Argument(metavar="ROUTES")]
Out = Annotated[str, typer.Argument(metavar="OUT")]
TokensFile = Annotated[
    str | None, typer.Option(metavar="FILE.json", help="A list of lists of token ids.")
]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="Through the model's tokenizer.")]
ProblemNumber = Annotated[
    int | None, typer.Option(metavar="N", help="A problem of arithmetic, with its answer.")
]
Layout = Annotated[str, typer.Option(metavar="tp=2,pp=2", help="Keys of policy.parallel.")]
Recompute = Annotated[str, typer.Option(help="none, full, block or moe+core_attn.")]
Precision = Annotated[Literal["fp32", "bf16"], typer.Option()]
MaxTokens = Annotated[int, typer.Option(min=1, help="Of a micro-batch.")]


@commands.callback()
def about() -> None:
    """Record, replay, compare, inspect or slice routes outside of a run."""
    ignore_import_warnings()


@commands.command(**listed("rltrain routes record tiny:qwen3 routes.safetensors --tokens ids.json"))
def record(
    model: Model,
    out: Out,
    tokens: TokensFile = None,
    prompt: Prompt = None,
    problem: ProblemNumber = None,
    layout: Layout = "",
    recompute: Recompute = "none",
    precision: Precision = "fp32",
    max_tokens: MaxTokens = 8192,
) -> int:
    """One pass of MODEL on some tokens: its routes to OUT, its numbers beside it."""
    from rltrain.verification.routes_arguments import PassOptions, TokenSource
    from rltrain.verification.routes_passes import record

    source = TokenSource.of(tokens=tokens, prompt=prompt, problem=problem)
    return record(model, source, PassOptions(layout, recompute, precision, max_tokens), out)


@commands.command(
    **listed("rltrain routes capture /models/my-qwen3-moe routes.safetensors --prompt 1+1=")
)
def capture(
    model: Model,
    out: Out,
    tokens: TokensFile = None,
    prompt: Prompt = None,
    problem: ProblemNumber = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option()] = "bfloat16",
) -> int:
    """The routes that a vLLM engine takes through some tokens: to OUT."""
    from rltrain.verification.routes_arguments import TokenSource

    source = TokenSource.of(tokens=tokens, prompt=prompt, problem=problem)
    from rltrain.verification.routes_capture import capture

    return capture(model, source, dtype, out)


@commands.command(
    **listed("rltrain routes replay tiny:qwen3 routes.safetensors replayed --layout tp=2")
)
def replay(
    model: Model,
    routes: RoutesFile,
    out: Out,
    layout: Layout = "",
    recompute: Recompute = "none",
    precision: Precision = "fp32",
    max_tokens: MaxTokens = 8192,
) -> int:
    """One pass of MODEL on saved ROUTES: its numbers to OUT."""
    from rltrain.verification.routes_arguments import PassOptions
    from rltrain.verification.routes_passes import replay

    return replay(model, routes, PassOptions(layout, recompute, precision, max_tokens), out)


@commands.command(**listed("rltrain routes compare routes.pass.safetensors replayed"))
def compare(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    tolerance: Annotated[float, typer.Option(help="Passes: relative error.")] = 1e-4,
    near_tie: Annotated[float, typer.Option(help="Routes: largest margin.")] = 1e-2,
) -> int:
    """Two pass files or two routes files: where they differ; the exit status is 1 when they do."""
    from rltrain.verification.routes_compare import compare_files

    return compare_files(a, b, tolerance, near_tie)


@commands.command(**listed("rltrain routes inspect routes.safetensors"))
def inspect(routes: RoutesFile) -> int:
    """What is in a file of ROUTES: coverage, duplicates, repeats, load."""
    from rltrain.verification.routes_command import inspect

    return inspect(routes)


@commands.command("slice", **listed("rltrain routes slice routes.safetensors --layout tp=2"))
def slice_routes(
    routes: RoutesFile,
    layout: Layout = "",
    rank: Annotated[str, typer.Option(metavar="tp=1,cp=0,pp=1,vp=0", help="Others are 0.")] = "",
    rows: Annotated[int, typer.Option(min=0, help="How many to show.")] = 8,
    num_layers: Annotated[
        int | None, typer.Option(help="Decoder layers, if the last has no router.")
    ] = None,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Context-parallel chunks in order.")
    ] = False,
) -> int:
    """What one rank sees of ROUTES: its layers, and tokens and experts of its first router rows."""
    from rltrain.verification.routes_command import slice_routes

    return slice_routes(
        routes, layout, rank, rows=rows, num_layers=num_layers, contiguous=contiguous
    )
