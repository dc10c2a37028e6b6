"""``rltrain routes compare``: two pass files, or two routes files, side by side."""

import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rltrain.verification import pass_file, routes_file
from rltrain.verification.pass_file import Pass, compare_passes
from rltrain.verification.routes_arguments import existing
from rltrain.verification.routes_difference import FirstDifference, compare_routes
from rltrain.verification.routes_file import Routes

LISTED = 5  # parameters and samples


def compare_files(a_file: str, b_file: str, tolerance: float, near_tie: float) -> int:
    """Print how far B's file is from A's.

    Args:
        tolerance: of passes, relative to the largest entry
        near_tie: of routes, the largest margin of two experts that may change places
    Returns:
        1 for passes with an error above the tolerance, and for routes with a difference that
        neither a near-tie nor an earlier difference explains.
    Raises:
        ValueError: they are not two files of one kind, or not of the same tokens and model.
    """
    a, b = existing(a_file), existing(b_file)
    kinds = {_kind(a), _kind(b)}
    if len(kinds) > 1:
        raise ValueError(
            f"{a} and {b}: one is a routes file and one a pass file; give two of a kind [RL7004]"
        )
    if kinds == {pass_file.HEADER}:
        return _passes(a, b, tolerance)
    return _routes(a, b, near_tie)


def _kind(path: Path) -> str:
    """Which of our headers the file has."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = set(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file, found {error} [RL7004]") from error
    kinds = metadata & {pass_file.HEADER, routes_file.HEADER}
    if len(kinds) != 1:
        raise ValueError(
            f"{path}: expected a file that `rltrain routes` wrote, with metadata "
            f"{routes_file.HEADER} or {pass_file.HEADER}, found metadata {sorted(metadata)}"
            " [RL7004]"
        )
    return kinds.pop()


def _passes(a: Path, b: Path, tolerance: float) -> int:
    expected, actual = Pass.load(a), Pass.load(b)
    errors = compare_passes(actual, expected)
    write = sys.stdout.write
    write(f"A {a}: {expected.about}\nB {b}: {actual.about}\n")
    write("largest errors of B, relative to A's largest entry\n")
    write(f"  {errors.logprobs:.1e}  log-probabilities, of token {errors.worst_token}\n")
    write(f"  {errors.loss:.1e}  loss, {float(expected.loss):.9g} and {float(actual.loss):.9g}\n")
    worst = sorted(errors.gradients.items(), key=lambda item: -item[1])[:LISTED]
    for name, error in worst:
        write(f"  {error:.1e}  gradient of {name}\n")
    equal = errors.largest <= tolerance
    write(f"{'within' if equal else 'NOT within'} the tolerance of {tolerance:g}\n")
    return int(not equal)


def _routes(a: Path, b: Path, near_tie: float) -> int:
    expected, actual = Routes.load(a), Routes.load(b)
    difference = compare_routes(actual, expected, near_tie)
    k, write = actual.ids.shape[2], sys.stdout.write
    write(f"A {a}: by {expected.producer}\nB {b}: by {actual.producer}\n")
    write(
        f"{difference.num_rows} rows in both, {difference.num_unmatched} in one alone; "
        f"overlap by chance is K/E = {k}/{actual.num_experts} = {k / actual.num_experts:.3f}\n"
        f"{'layer':>5} {'overlap':>8} {'differing':>10} {'near-ties':>10} {'unexplained':>12}\n"
    )
    for at in difference.layers:
        write(
            f"{at.layer:>5} {at.overlap:>8.4f} {at.differing:>10} {at.near_ties:>10} "
            f"{at.unexplained:>12}\n"
        )
    for first in difference.firsts[:LISTED]:
        write(f"{_sentence(first)}\n")
    if (more := len(difference.firsts) - LISTED) > 0:
        write(f"and {more} more samples that differ\n")
    if expected.margins is None and actual.margins is None and difference.firsts:
        write("neither file has margins, so nothing counts as a near-tie\n")
    bad = difference.unexplained
    write(
        f"{bad} differences that neither a near-tie (margin up to {near_tie:g}) nor an earlier "
        "difference explains\n"
    )
    return int(bad > 0)


def _sentence(first: FirstDifference) -> str:
    margin = "unknown" if first.margin is None else f"{first.margin:.2g}"
    return (
        f"sample {first.sample}: first at row {first.row} (token {first.token}), layer "
        f"{first.layer}: A {list(first.expected)}, B {list(first.actual)}, margin {margin}"
        f"{', a near-tie' if first.is_near_tie else ''}"
    )
