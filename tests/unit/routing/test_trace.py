"""The hash trace notices what changed between engine and router, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from rltrain.batch import SampleRoutes
from rltrain.routing.codec import decode, token_checksum
from rltrain.routing.integrity import CheckedRoutes, RouteShape
from rltrain.routing.objects import pack_routes
from rltrain.routing.trace import check_refs, check_trace

SHAPE = RouteShape(num_layers=5, moe_layers=(1, 2, 4), num_experts=512, experts_per_token=2)
LENGTHS = (4, 4, 3)
MISSING = (1, 3)  # rows of sample 1
TOKENS = [torch.tensor([7, 8, 9, 7]), torch.tensor([9, 8, 7, 9]), torch.tensor([1, 2, 3])]
Trace = dict[str, list[Tensor]]


def sent() -> tuple[list[SampleRoutes], list[Tensor]]:
    """References to the routes of three samples, in blocks of layers (1, 2) and (4,); the routes as
    a worker holds them, with a row for the last token.  # [tokens, L, K] each"""
    rng = np.random.default_rng(0)
    ids = [rng.random((n - 1, 3, 512)).argsort(-1)[..., :2] for n in LENGTHS]
    ids[0][0, 0, 0] = 500  # does not fit a byte
    checked = [
        CheckedRoutes(rows, token_checksum(tokens.numpy()), (MISSING,) if number == 1 else ())
        for number, (rows, tokens) in enumerate(zip(ids, TOKENS, strict=True))
    ]
    _, refs = pack_routes(checked, SHAPE, (2, 1), weight_version=3, producer="vLLM 0.30.0")
    last = np.zeros((1, 3, 2), dtype=np.int64)
    stored = [np.concatenate([rows, last]).astype(np.uint16).view(np.int16) for rows in ids]
    return [(ref,) for ref in refs], [torch.from_numpy(rows) for rows in stored]


def honest() -> Trace:
    """Routers that used what was sent, and chose rows that owe or have no route themselves."""
    _, stored = sent()
    used = [rows.clone() for rows in stored]
    used[1][slice(*MISSING)] = 11
    for rows in used:
        rows[-1] = 12
    return {"read": [t.clone() for t in TOKENS], "used": used, "stored": stored}


def compare(trace: Trace, layers: tuple[int, ...] = (1, 2, 4)) -> int:
    own = [SHAPE.moe_layers.index(layer) for layer in layers]
    cut = trace | {name: [rows[:, own] for rows in trace[name]] for name in ("used", "stored")}
    return check_trace(sent()[0], layers=layers, when="the update", **cut)


def test_what_was_sent_and_used_is_the_same() -> None:
    assert compare(honest()) == 3 * (1 + 2)


@pytest.mark.parametrize(
    ("layers", "per_sample"), [((1, 2), 2), ((4,), 2), ((2, 4), 2), ((1,), 1), ((4, 2, 1), 3)]
)
def test_a_block_that_is_partly_owned_has_no_hash(layers: tuple[int, ...], per_sample: int) -> None:
    assert compare(honest(), layers) == 3 * per_sample
    changed = honest()
    for rows in changed["used"]:
        rows[0, 0] = 3  # layer 1
    if {1, 2} <= set(layers):
        with pytest.raises(RuntimeError, match=r"layers \[1, 2\]"):
            compare(changed, layers)
    else:
        assert compare(changed, layers) == 3 * per_sample


def change_expert(trace: Trace, sample: int, row: int, layer: int, column: int) -> None:
    trace["used"][sample][row, layer, column] ^= 1


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize(
    ("sample", "row", "layer", "named"),
    [(0, 0, 0, [1, 2]), (0, 2, 1, [1, 2]), (1, 0, 2, [4]), (2, 1, 2, [4])],
)
def test_one_changed_expert_is_named_by_sample_and_layers(
    sample: int, row: int, layer: int, named: list[int], column: int
) -> None:
    trace = honest()
    change_expert(trace, sample, row, layer, column)
    with pytest.raises(RuntimeError) as error:
        compare(trace)
    where = f"the update, sample {sample} by vLLM 0.30.0 at weight version 3, layers {named}: "
    assert str(error.value).startswith(where)


def use_other_tokens(trace: Trace) -> None:
    trace["read"][2][0] = 5


def swap_samples(trace: Trace) -> None:
    for values in trace.values():
        values[0], values[1] = values[1], values[0]


def swap_routes(trace: Trace) -> None:
    used = trace["used"]
    used[0], used[1] = used[1], used[0]


def shift_rows(trace: Trace) -> None:
    trace["used"][0] = trace["used"][0].roll(1, 0)


def rotate_layers(trace: Trace) -> None:
    trace["used"] = [rows.roll(1, 1) for rows in trace["used"]]


@pytest.mark.parametrize(
    ("spoil", "answer"),
    [
        (use_other_tokens, "sample 2 .* other tokens"),
        (swap_samples, "sample 0 .* other tokens"),
        (swap_routes, "sample 0 .* other experts"),
        (shift_rows, "sample 0 .* other experts"),
        (rotate_layers, "sample 0 .* other experts"),
    ],
)
def test_a_mix_up_is_noticed(spoil: Callable[[Trace], None], answer: str) -> None:
    trace = honest()
    spoil(trace)
    with pytest.raises(RuntimeError, match=answer):
        compare(trace)


def test_the_last_token_may_be_any() -> None:
    """No router's row counts for it: nothing was sampled after it."""
    trace = honest()
    trace["read"][0][-1] = 60
    trace["used"][0][-1] = 1
    assert compare(trace) == 9


def test_a_missing_row_must_be_the_one_that_was_stored() -> None:
    trace = honest()
    trace["stored"][1][MISSING[0], 0, 0] ^= 1
    with pytest.raises(RuntimeError, match="sample 1"):
        compare(trace)
    trace = honest()
    change_expert(trace, 1, MISSING[1] - 1, 0, 0)  # whatever the router chose there
    assert compare(trace) == 9


# At the worker's boundary

VERSIONS = torch.tensor([3, 3, 3])


def test_a_missing_row_must_repeat_what_was_recorded() -> None:
    """With ``fallback=r2`` the update repeats the experts of the log-probability pass."""
    trace = honest()
    trace["repeated"] = [rows.clone() for rows in trace["used"]]
    check = partial(check_trace, sent()[0], layers=(1, 2, 4), when="the update")
    assert check(**trace) == compare(honest())
    trace["repeated"][1][MISSING[1] - 1, 2, 1] = 13
    with pytest.raises(RuntimeError, match=r"sample 1 .*rows 1 to 2: .* pass recorded"):
        check(**trace)
    trace = honest()
    trace["repeated"] = trace["stored"]  # what stands in those rows is no choice of anyone
    with pytest.raises(RuntimeError, match="pass recorded"):
        check(**trace)


def test_routes_belong_to_their_samples() -> None:
    refs, _ = sent()
    check_refs(refs, TOKENS, VERSIONS)
    check_refs(refs, TOKENS, None)
    check_refs([], [], torch.tensor([]))


def test_swapped_references_of_equal_length_are_refused() -> None:
    (first, second, third), _ = sent()
    assert first[0].rows == second[0].rows
    with pytest.raises(RuntimeError, match=r"sample 0, routes by vLLM 0\.30\.0 .* other tokens"):
        check_refs([second, first, third], TOKENS, VERSIONS)


def test_references_of_other_weights_are_refused() -> None:
    refs, _ = sent()
    for other in 2, 4:
        refs[1] = (replace(refs[1][0], weight_version=other),)
        with pytest.raises(RuntimeError, match=rf"sample 1, .*version {other}: its .* version 3"):
            check_refs(refs, TOKENS, VERSIONS)


def in_two_turns() -> list[SampleRoutes]:
    """References to the same routes, those of sample 1 in two parts."""
    samples, stored = sent()
    rows = decode(stored[1]).numpy()
    turns = [
        CheckedRoutes(rows[:2], token_checksum(TOKENS[1][:3].numpy()), ((1, 2),)),
        CheckedRoutes(rows[2:3], token_checksum(TOKENS[1][2:].numpy()), ((2, 3),), first_row=2),
    ]
    _, refs = pack_routes(turns, SHAPE, (2, 1), weight_version=3, producer="vLLM 0.30.0")
    return [samples[0], tuple(refs), samples[2]]


def test_the_routes_of_a_sample_may_come_turn_by_turn() -> None:
    samples = in_two_turns()
    check_refs(samples, TOKENS, VERSIONS)
    layers = SHAPE.moe_layers
    assert check_trace(samples, **honest(), layers=layers, when="the update") == 4 * (1 + 2)
    trace = honest()
    trace["used"][1][0, 0] = trace["used"][1][0, 1] + 1
    with pytest.raises(RuntimeError, match=r"sample 1 by .*other experts"):
        check_trace(samples, **trace, layers=layers, when="the update")
    first, (one, two), last = samples
    with pytest.raises(RuntimeError, match="sample 1: expected 3 rows of routes for 4 tokens, fou"):
        check_refs([first, (one,), last], TOKENS, VERSIONS)
    with pytest.raises(RuntimeError, match="from row 2 on: they were captured for other tokens"):
        moved = TOKENS[1].clone()
        moved[2] = 0  # the last of the first turn, which the second one read
        check_refs([first, (one, two), last], [TOKENS[0], moved, TOKENS[2]], VERSIONS)


def test_every_sample_has_references() -> None:
    refs, _ = sent()
    with pytest.raises(ValueError, match="argument 2"):
        check_refs(refs[:2], TOKENS, VERSIONS)
