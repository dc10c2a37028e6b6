"""``rltrain routes inspect`` and ``slice``: what is in a file, and what a rank sees of it."""

import sys

from rltrain.parallel.layer_map import Pipeline, route_layers
from rltrain.parallel.token_layout import PAD, TokenGrid
from rltrain.verification.rank_view import rank_view
from rltrain.verification.routes_arguments import load_routes, parse_layout, parse_sizes
from rltrain.verification.routes_inspection import inspect_routes


def inspect(routes_file: str) -> int:
    """What is in a file of ROUTES: coverage, duplicates, repeats, load."""
    saved = load_routes(routes_file)
    seen = inspect_routes(saved)
    write = sys.stdout.write
    write(
        f"{routes_file}: by {saved.producer}, weight version {saved.weight_version}\n"
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


def slice_routes(
    routes_file: str,
    layout_sizes: str,
    rank: str,
    *,
    rows: int,
    num_layers: int | None,
    contiguous: bool,
) -> int:
    """What one rank sees of ROUTES: its layers, and token and experts of its first router rows."""
    saved = load_routes(routes_file)
    layout = parse_layout(layout_sizes)
    sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vp": layout.vpp}
    coordinates = dict.fromkeys(sizes, 0) | parse_sizes(rank, "--rank", list(sizes))
    for name, size in sizes.items():
        if not 0 <= coordinates[name] < size:
            raise ValueError(
                f"--rank {name}={coordinates[name]}: expected 0 to {size - 1} by --layout [RL7004]"
            )
    last = max(saved.layers, default=0)
    if num_layers is None:
        num_layers = last + 1
    if num_layers <= last:
        raise ValueError(
            f"--num-layers {num_layers}: {routes_file} has routes of layer {last} [RL7004]"
        )
    layers = route_layers(
        Pipeline.of(layout), num_layers, saved.layers, coordinates["pp"], coordinates["vp"]
    )
    grid = TokenGrid(
        layout.tp, coordinates["tp"], layout.cp, coordinates["cp"], zigzag=not contiguous
    )
    view = rank_view(saved, grid, layers)
    padding = int((view.index == PAD).sum())
    sys.stdout.write(
        f"layers with a router: {', '.join(map(str, layers)) or 'none'}\n"
        f"{len(view.index)} router rows, {padding} of them padding\n"
        f"{'row':>5} {'token':>6} {'id':>7}  experts by layer\n"
    )
    for row, token in enumerate(view.index.tolist()[:rows]):
        experts = "  ".join(",".join(map(str, ids)) for ids in view.experts[row].tolist())
        names = ["pad", "-"] if token == PAD else [f"{token}", f"{int(saved.tokens[token])}"]
        live = "" if view.replayed[row] else "  (routes natively)"
        sys.stdout.write(f"{row:>5} {names[0]:>6} {names[1]:>7}  {experts}{live}\n")
    return 0
