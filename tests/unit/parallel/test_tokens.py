"""Where tokens live, over the whole product of tensor and context parallelism."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.parallel.tokens import PAD, TokenGrid, TokenLayout, layout_tokens, take

lengths = st.lists(st.integers(1, 11), min_size=1, max_size=7)
sizes = st.sampled_from([1, 2, 4])


def layouts(seq_lens: list[int], tp: int, cp: int) -> list[TokenLayout]:
    grids = [TokenGrid(tp, t, cp, c) for c in range(cp) for t in range(tp)]
    return [layout_tokens(seq_lens, grid) for grid in grids]


@given(lengths, sizes, sizes)
def test_router_rows_are_a_permutation_of_the_tokens(seq_lens: list[int], tp: int, cp: int) -> None:
    rows = torch.cat([layout.routers for layout in layouts(seq_lens, tp, cp)])
    assert sorted(rows[rows != PAD].tolist()) == list(range(sum(seq_lens)))


@given(lengths, sizes, sizes)
def test_all_ranks_hold_equally_many_slots(seq_lens: list[int], tp: int, cp: int) -> None:
    found = {(len(x.tokens), len(x.routers), len(x.targets)) for x in layouts(seq_lens, tp, cp)}
    assert len(found) == 1
    slots, rows, _ = found.pop()
    assert slots == rows * tp


@given(lengths, sizes)
def test_every_token_but_the_first_is_predicted_once_by_the_one_before(
    seq_lens: list[int], cp: int
) -> None:
    pairs = [
        (reads, predicts)
        for layout in layouts(seq_lens, 1, cp)
        for reads, predicts in zip(layout.tokens.tolist(), layout.targets.tolist(), strict=True)
        if predicts != PAD
    ]
    starts = {sum(seq_lens[:i]) for i in range(len(seq_lens))}
    assert all(predicts == reads + 1 for reads, predicts in pairs)
    assert sorted(p for _, p in pairs) == [t for t in range(sum(seq_lens)) if t not in starts]


@given(lengths, sizes, sizes)
def test_boundaries_cover_all_slots_and_cut_evenly(seq_lens: list[int], tp: int, cp: int) -> None:
    layout = layouts(seq_lens, tp, cp)[0]
    padded = layout.cu_seqlens.diff().tolist()
    assert int(layout.cu_seqlens[-1]) == len(layout.tokens) * cp
    assert all(size >= n for size, n in zip(padded, seq_lens, strict=True))
    assert layout.max_seqlen == max(padded)
    if cp > 1:
        assert all(size % (2 * cp) == 0 for size in padded)


def test_context_parallel_ranks_take_a_chunk_from_each_end() -> None:
    first, second = layouts([8], 1, 2)
    assert first.tokens.tolist() == [0, 1, 6, 7]
    assert second.tokens.tolist() == [2, 3, 4, 5]


def test_no_sequence_is_one_padding_sequence_on_every_rank() -> None:
    for layout in layouts([], 2, 2):
        assert len(layout.tokens) == 2
        assert (layout.tokens == PAD).all() and (layout.targets == PAD).all()


@given(lengths, sizes)
def test_take_gathers_and_pads(seq_lens: list[int], cp: int) -> None:
    values = torch.arange(sum(seq_lens)) * 10
    for layout in layouts(seq_lens, 1, cp):
        expected = [-7 if t == PAD else 10 * t for t in layout.tokens.tolist()]
        assert take(values, layout.tokens, -7).tolist() == expected
