"""``rltrain routes``: record, replay, compare and look at routes, without a training run.

Each subcommand imports its module when it runs: only some need Megatron, Ray or vLLM.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rltrain.parallel.layer_map import Pipeline, route_layers
from rltrain.parallel.token_layout import PAD, TokenGrid
from rltrain.verification.rank_view import rank_view
from rltrain.verification.routes_arguments import load_routes, parse_layout, parse_sizes
from rltrain.verification.routes_inspection import inspect_routes

LAYOUT = "tp=2,pp=2,...; keys of policy.parallel"
MODEL = "a Hugging Face folder, or tiny:qwen3 and the like, with seeded weights"


def routes(arguments: Sequence[str]) -> int:
    """Run one subcommand; 1 when compared files differ.

    Raises:
        ValueError: naming the file or option, and what to do.
    """
    options = _parser().parse_args(list(arguments))
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rltrain routes", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], int], name: str, *files: str) -> Any:
        about = (run.__doc__ or "").strip()
        added = commands.add_parser(name, help=about.splitlines()[0], description=about)
        added.set_defaults(run=run)
        for file in files:
            added.add_argument(file, help=MODEL if file == "model" else None)
        return added

    for added in (
        record := command(_record, "record", "model", "out"),
        capture := command(_capture, "capture", "model", "out"),
    ):
        tokens = added.add_mutually_exclusive_group(required=True)
        tokens.add_argument("--tokens", metavar="FILE.json", help="a list of lists of token ids")
        tokens.add_argument("--prompt", metavar="TEXT", help="through the model's tokenizer")
        tokens.add_argument("--problem", type=int, metavar="N", help="arithmetic, with its answer")
    capture.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    replay = command(_replay, "replay", "model", "routes", "out")
    for added in (record, replay):
        added.add_argument("--layout", default="", help=LAYOUT)
        added.add_argument("--recompute", default="none", help="none, full, block or moe+core_attn")
        added.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
        added.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch")
    compare = command(_compare, "compare", "a", "b")
    compare.add_argument("--tolerance", type=float, default=1e-4, help="passes: relative error")
    compare.add_argument("--near-tie", type=float, default=1e-2, help="routes: largest margin")
    command(_inspect, "inspect", "routes")
    cut = command(_slice, "slice", "routes")
    cut.add_argument("--layout", default="", help=LAYOUT)
    cut.add_argument("--rank", default="", metavar="tp=1,cp=0,pp=1,vp=0", help="others are 0")
    cut.add_argument("--rows", type=int, default=8, help="how many to show")
    cut.add_argument("--num-layers", type=int, help="decoder layers, if the last has no router")
    cut.add_argument("--contiguous", action="store_true", help="context-parallel chunks in order")
    return parser


def _record(options: argparse.Namespace) -> int:
    """One pass of MODEL on some tokens: its routes to OUT, its numbers beside it."""
    from rltrain.verification.routes_passes import record

    return record(options)


def _replay(options: argparse.Namespace) -> int:
    """One pass of MODEL on saved ROUTES: its numbers to OUT."""
    from rltrain.verification.routes_passes import replay

    return replay(options)


def _capture(options: argparse.Namespace) -> int:
    """The routes that a vLLM engine takes through some tokens: to OUT."""
    from rltrain.verification.routes_capture import capture

    return capture(options)


def _compare(options: argparse.Namespace) -> int:
    """Two pass files or two routes files: where they differ; status 1 when they do."""
    from rltrain.verification.routes_compare import compare_files

    return compare_files(options)


def _inspect(options: argparse.Namespace) -> int:
    """What is in a file of ROUTES: coverage, duplicates, repeats, load."""
    saved = load_routes(options.routes)
    seen = inspect_routes(saved)
    write = sys.stdout.write
    write(
        f"{options.routes}: by {saved.producer}, weight version {saved.weight_version}\n"
        f"{seen.num_sequences} sequences, {seen.num_tokens} tokens, {len(saved.layers)} layers, "
        f"{saved.ids.shape[2]} of {saved.num_experts} experts, {seen.dtype}, "
        f"margins {'known' if saved.margins is not None else 'not known'}\n"
        f"coverage {seen.coverage:.2%}; rows with distinct experts {seen.valid_fraction:.2%}; "
        f"layers of zeros: {', '.join(map(str, seen.zero_layers)) or 'none'}\n"
        f"{'layer':>5} {'duplicate rows':>15} {'longest repeat':>15} {'peak / mean load':>17}\n"
    )
    for layer in saved.layers:
        write(
            f"{layer:>5} {seen.duplicate_rows[layer]:>15} {seen.longest_repeat[layer]:>15} "
            f"{seen.peak_load[layer]:>17.2f}\n"
        )
    return 0


def _slice(options: argparse.Namespace) -> int:
    """What one rank sees of ROUTES: its layers, and token and experts of its first router rows."""
    saved = load_routes(options.routes)
    layout = parse_layout(options.layout)
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vp": layout.vpp}
    coordinates = dict.fromkeys(sizes, 0) | parse_sizes(options.rank, "--rank", list(sizes))
    for name, size in sizes.items():
        if not 0 <= coordinates[name] < size:
            raise ValueError(
                f"--rank {name}={coordinates[name]}: expected 0 to {size - 1} by --layout"
            )
    last = max(saved.layers, default=0)
    num_layers = last + 1 if options.num_layers is None else options.num_layers
    if num_layers <= last:
        raise ValueError(f"--num-layers {num_layers}: {options.routes} has routes of layer {last}")
    layers = route_layers(
        Pipeline.of(layout), num_layers, saved.layers, coordinates["pp"], coordinates["vp"]
    )
    grid = TokenGrid(
        layout.tp, coordinates["tp"], layout.cp, coordinates["cp"], zigzag=not options.contiguous
    )
    view = rank_view(saved, grid, layers)
    padding = int((view.index == PAD).sum())
    sys.stdout.write(
        f"layers with a router: {', '.join(map(str, layers)) or 'none'}\n"
        f"{len(view.index)} router rows, {padding} of them padding\n"
        f"{'row':>5} {'token':>6} {'id':>7}  experts by layer\n"
    )
    for row, token in enumerate(view.index.tolist()[: options.rows]):
        experts = "  ".join(",".join(map(str, ids)) for ids in view.experts[row].tolist())
        names = ["pad", "-"] if token == PAD else [f"{token}", f"{int(saved.tokens[token])}"]
        live = "" if view.replayed[row] else "  (routes natively)"
        sys.stdout.write(f"{row:>5} {names[0]:>6} {names[1]:>7}  {experts}{live}\n")
    return 0
