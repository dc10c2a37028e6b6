"""Runs of rows, and runs of equal routes that a router cannot have produced."""

from math import ceil, comb, inf, log10

import numpy as np
from numpy.typing import NDArray

from rltrain.routing.codec import RouteIds


def runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The half-open ranges in which ``flags`` [n] is True, in order."""
    padded = np.concatenate([[False], flags, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def repeated_rows(ids: RouteIds) -> list[tuple[int, int]]:
    """The half-open ranges of rows of ``ids`` [rows, L, K] that are equal in all layers."""
    repeats = (ids[1:, 0] == ids[:-1, 0]).all(axis=1)  # one layer tells most rows apart
    candidates = np.flatnonzero(repeats)
    repeats[candidates] = (ids[candidates + 1] == ids[candidates]).all(axis=(1, 2))
    return [(start, end + 1) for start, end in runs(repeats)]


def stale_runs(
    ids: RouteIds, tokens: NDArray[np.integer], num_experts: int
) -> list[tuple[int, int]]:
    """The runs of equal rows of ``ids`` [rows, L, K] that read `stale_tokens` different tokens."""
    _, num_layers, experts_per_token = ids.shape
    enough = stale_tokens(num_layers, num_experts, experts_per_token)
    if len(ids) < enough:
        return []
    return [
        (start, end)
        for start, end in repeated_rows(ids)
        if end - start >= enough and len(np.unique(tokens[start:end])) >= enough
    ]


def stale_tokens(num_layers: int, num_experts: int, experts_per_token: int) -> float:
    """Minimum number of different tokens with one route in all layers that make the route stale.

    Rows that were never written keep the routes of an earlier batch (sglang#36404: one row, 67
    times). A valid run of equal rows has equal tokens: a prompt that repeats one token repeats its
    route in every layer. So only different tokens are counted, each once. Loops such as "ABABAB"
    are then no stale runs either.

    The threshold n is where ``chance ** (n - 1)`` falls to 1e-12: one false alarm in a hundred runs
    of 1e10 rows. ``chance`` bounds the probability that another token has the same experts in every
    layer. It is the cube root of the probability for uniform, independent choices, which allows for
    uneven and correlated choices, and it is at least 0.1 in small models. Measured on random
    models, over pairs of different tokens:

        layers, top-k of experts   measured   bound
        1, top-2 of 8              0.11       0.33
        2, top-2 of 8              0.008      0.11
        1, top-1 of 8              0.37       0.5

    Models of a usual size have a cube root below 1e-12 (48 layers of top-8 of 128: 1e-194). There
    one repeat is enough, such as a row that stands twice at the boundary of two parts.
    """
    choices = comb(num_experts, experts_per_token) ** num_layers
    if choices == 1:
        return inf  # every row is equal
    digits = log10(choices) / 3
    return 2 if digits >= 12 else 1 + ceil(12 / min(1.0, digits))
