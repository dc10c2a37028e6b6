"""Thousands of malformed payloads at the engine boundary: none reaches a router."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rltrain.rollout.completion import sampled_logprobs
from rltrain.rollout.requests import Request
from rltrain.routing.codec import RouteIds, decode
from rltrain.routing.integrity import CheckedRoutes, RouteShape, check_routes
from rltrain.routing.objects import assemble_routes, pack_routes

SHAPES = [
    RouteShape(num_layers=3, moe_layers=(1, 2), num_experts=8, experts_per_token=2),
    RouteShape(num_layers=2, moe_layers=(0, 1), num_experts=256, experts_per_token=4),
    RouteShape(num_layers=4, moe_layers=(0, 3), num_experts=512, experts_per_token=3),
]
Rng = np.random.Generator
Spoil = Callable[[RouteIds, Rng, RouteShape], Any]
EVERYTHING = slice(None)


def honest(rng: Rng, shape: RouteShape, rows: int) -> RouteIds:
    """Distinct experts in every row and layer; garbage where the engine has no router."""
    start = rng.integers(0, shape.num_experts, (rows, shape.num_layers, 1))
    step = rng.choice([1, 3, 5], (rows, shape.num_layers, 1))  # no divisor of any num_experts
    ids = (start + step * np.arange(shape.experts_per_token)) % shape.num_experts
    dense = [n for n in range(shape.num_layers) if n not in shape.moe_layers]
    ids[:, dense] = 0
    return ids.astype(rng.choice(["int16", "uint16", "int32", "int64"]))


def somewhere(ids: RouteIds, rng: Rng, shape: RouteShape) -> tuple[int, int, int]:
    return (
        int(rng.integers(len(ids))),
        int(rng.choice(shape.moe_layers)),
        int(rng.integers(ids.shape[2])),
    )


# Each returns what the engine sends instead, and which rows that costs.


def short(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    kept = int(rng.integers(0, len(ids)))
    return ids[:kept], slice(kept, None)


def long(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    return np.concatenate([ids, ids[: rng.integers(1, len(ids) + 1)]]), EVERYTHING


def more_columns(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    return np.concatenate([ids, ids[..., :1]], axis=2), EVERYTHING


def fewer_columns(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    return ids[..., :-1], EVERYTHING


def other_layers(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    return (ids[:, :-1] if rng.random() < 0.5 else np.concatenate([ids, ids], axis=1)), EVERYTHING


def flat(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    return ids.reshape(len(ids), -1), EVERYTHING


def duplicate(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    row, layer, column = somewhere(ids, rng, shape)
    ids[row, layer, column] = ids[row, layer, column - 1]
    return ids, row


def out_of_range(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    """Huge, negative, and what is in range once cut to the bytes that are stored."""
    where = somewhere(ids, rng, shape)
    wide = ids.astype(np.int64)
    wide[where] = rng.choice(
        [-1, shape.num_experts, 2**62, -(2**62), int(wide[where]) + 256 * shape.num_experts, 65536]
    )
    return wide, where[0]


def unsigned_sentinel(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    row, layer, column = somewhere(ids, rng, shape)
    wide = ids.astype(np.uint64)
    wide[row, layer, column] = 2**64 - 1  # -1 of an engine that fills before it casts
    return wide, row


def other_dtype(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    return ids.astype(
        rng.choice(["float32", "float64", "bool", "complex64", "U3", "O"])
    ), EVERYTHING


def not_an_array(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    other = [None, ids.tolist(), ids.tobytes(), torch.from_numpy(ids.astype(np.int64)), 3][
        rng.integers(5)
    ]
    return other, EVERYTHING


def zero_layer(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    ids[:, rng.choice(shape.moe_layers)] = 0
    return ids, EVERYTHING


def all_zero(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    return np.zeros_like(ids), EVERYTHING


def stale(ids: RouteIds, rng: Rng, shape: RouteShape) -> Any:
    start = int(rng.integers(0, len(ids) - 20))
    end = int(rng.integers(start + 15, len(ids)))
    # A step no honest row has, so that no neighbour is equal by chance.
    ids[start:end, list(shape.moe_layers)] = 2 * np.arange(shape.experts_per_token)
    return ids, slice(start, end)


SPOILS: list[Spoil] = [
    short,
    long,
    more_columns,
    fewer_columns,
    other_layers,
    flat,
    duplicate,
    out_of_range,
    unsigned_sentinel,
    other_dtype,
    not_an_array,
    zero_layer,
    all_zero,
    stale,
]


def at_the_router(checked: list[CheckedRoutes], shape: RouteShape) -> list[tuple[Any, set[int]]]:
    """Through the objects, as a policy worker gets it: ids and the rows said to be missing."""
    arrays, refs = pack_routes(checked, shape, (1, len(shape.moe_layers) - 1), 0, "fuzz")
    found = []
    for ref in refs:
        blocks = {n: arrays[block] for n, block in enumerate(ref.blocks)}
        ids = decode(torch.from_numpy(assemble_routes(ref, blocks, shape.moe_layers))).numpy()
        found.append((ids, {row for span in ref.missing for row in range(*span)}))
    return found


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_malformed_routes_are_refused_or_fall_back(spoil: Spoil) -> None:
    """100 engine calls of 8 samples, 7 or 8 malformed: over 10,000 payloads in all, each twice."""
    rng = np.random.default_rng(SPOILS.index(spoil))
    payloads = 0
    for call in range(100):
        shape = SHAPES[call % len(SHAPES)]
        rows = [int(n) for n in rng.integers(30, 45, 8)]
        true = [honest(rng, shape, n) for n in rows]
        spoiled = [spoil(ids.copy(), rng, shape) for ids in true]
        if call % 2:
            spoiled[3] = true[3], slice(0, 0)
        routes = [payload for payload, _ in spoiled]
        tokens = [list(range(n + 1)) for n in rows]
        names = [f"sample {n};" for n in range(8)]
        for n in range(8):
            if len(lost_rows(spoiled[n][1], rows[n])):
                payloads += 1
                with pytest.raises(ValueError, match=f"fuzz, sample {n}"):
                    check_routes([routes[n]], [tokens[n]], shape, [names[n]], "fuzz")
        checked = check_routes(routes, tokens, shape, names, "fuzz", "live")
        for n, (ids, missing) in enumerate(at_the_router(checked, shape)):
            assert ids.shape == (rows[n], len(shape.moe_layers), shape.experts_per_token)
            assert ids.min() >= 0 and ids.max() < shape.num_experts
            assert (np.diff(np.sort(ids, axis=2), axis=2) > 0).all(), "an expert chosen twice"
            assert missing == set(lost_rows(spoiled[n][1], rows[n]).tolist())
            kept = sorted(set(range(rows[n])) - missing)
            assert np.array_equal(ids[kept], true[n][kept][:, list(shape.moe_layers)])
            assert bool(checked[n].faults) == bool(missing)
    assert payloads >= 750


def lost_rows(rows: Any, count: int) -> Any:
    return np.atleast_1d(np.arange(count)[rows])


def test_damaged_objects_are_refused() -> None:
    """Bytes cut off, flipped, or those of other rows."""
    rng = np.random.default_rng(0)
    for case in range(1000):
        shape = SHAPES[case % len(SHAPES)]
        sample = honest(rng, shape, 12)[:, list(shape.moe_layers)]
        (array,), (ref,) = pack_routes(
            [CheckedRoutes(sample, 0)], shape, (len(shape.moe_layers),), 0, "fuzz"
        )
        raw = bytearray(array.tobytes())
        if case % 3 == 0:
            row_bytes = len(raw) // 12
            raw = raw[: -row_bytes * int(rng.integers(1, 12))]
        elif case % 3 == 1:
            raw[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
        else:
            raw = raw[len(raw) // 12 :] + raw[: len(raw) // 12]
        damaged = np.frombuffer(bytes(raw), dtype=array.dtype).reshape(-1, *array.shape[1:])
        with pytest.raises(ValueError, match="routes, block 0"):
            assemble_routes(ref, {0: damaged}, shape.moe_layers)


def test_a_log_probability_that_is_no_number_is_always_an_error() -> None:
    rng = np.random.default_rng(0)
    for case in range(1000):
        count = int(rng.integers(1, 30))
        values = [float(x) for x in -rng.random(count)]
        bad = int(rng.integers(count))
        values[bad] = (np.nan, np.inf, -np.inf)[case % 3]
        # As vLLM lays flat log-probabilities out; only its two attributes are read.
        flat_logprobs = SimpleNamespace(token_ids=list(range(count)), logprobs=values)
        completion = SimpleNamespace(token_ids=list(range(count)), logprobs=flat_logprobs)
        with pytest.raises(ValueError, match=f"prompt p sample 3, response token {bad}: "):
            sampled_logprobs(Request((1,), 0, "p", 3), completion)
