"""Where tokens live, over the whole product of tensor and context parallelism."""

from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.parallel.token_layout import PAD, TokenGrid, TokenLayout, gather_rows, layout_tokens

lengths = st.lists(st.integers(0, 11), max_size=7)
sizes = st.sampled_from([1, 2, 4])


@dataclass(frozen=True)
class Ranks:
    tp: int = 1
    cp: int = 1
    align: int = 1
    zigzag: bool = True

    def grid(self, tp_rank: int = 0, cp_rank: int = 0) -> TokenGrid:
        return TokenGrid(self.tp, tp_rank, self.cp, cp_rank, self.align, self.zigzag)

    def layouts(self, seq_lens: list[int]) -> list[TokenLayout]:
        """Of all ranks, tensor-parallel ranks side by side."""
        at = product(range(self.cp), range(self.tp))
        return [layout_tokens(seq_lens, self.grid(tp_rank, cp_rank)) for cp_rank, tp_rank in at]


every_rank = st.builds(Ranks, sizes, sizes, st.sampled_from([1, 3, 16, 128]), st.booleans())


@given(lengths, every_rank)
@example([1], Ranks(4, 4, 16))
@example([0, 1, 0], Ranks(2, 2))
@example([], Ranks(2, 2, 128, False))
def test_router_rows_are_a_permutation_of_the_tokens(seq_lens: list[int], ranks: Ranks) -> None:
    rows = torch.cat([layout.routers for layout in ranks.layouts(seq_lens)])
    assert sorted(rows[rows != PAD].tolist()) == list(range(sum(seq_lens)))


@given(lengths, every_rank)
@example([], Ranks(2, 4, 128))
@example([0], Ranks(4, 2, 16, False))
def test_all_ranks_hold_equally_many_aligned_slots(seq_lens: list[int], ranks: Ranks) -> None:
    layouts = ranks.layouts(seq_lens)
    assert len({(len(x.tokens), len(x.routers), len(x.targets)) for x in layouts}) == 1
    assert len({tuple(x.cu_seqlens.tolist()) for x in layouts}) == 1
    rows = len(layouts[0].routers)
    assert rows > 0 and rows % ranks.align == 0
    assert len(layouts[0].tokens) == rows * ranks.tp


@given(lengths, every_rank)
@example([33], Ranks(2, 2, 16))
def test_slices_gather_back_into_whole_sequences(seq_lens: list[int], ranks: Ranks) -> None:
    """Each slot's place in its padded sequence is worked out here slot by slot."""
    values = torch.arange(100, 100 + sum(seq_lens))
    padded = ranks.layouts(seq_lens)[0].cu_seqlens.diff().tolist()
    whole = [torch.full((size,), -9) for size in padded]
    for cp_rank in range(ranks.cp):
        parts = [
            gather_rows(values, layout_tokens(seq_lens, ranks.grid(tp_rank, cp_rank)).routers, -7)
            for tp_rank in range(ranks.tp)
        ]
        local, slot = torch.cat(parts), 0
        for sequence, size in zip(whole, padded, strict=True):
            for i in range(size // ranks.cp):
                sequence[place(i, size, cp_rank, ranks)] = local[slot]
                slot += 1
        assert slot == len(local)
    start = 100
    for n, sequence in zip(seq_lens or [0], whole, strict=True):
        assert sequence[:n].tolist() == list(range(start, start + n))
        assert (sequence[n:] == -7).all()
        start += n


def place(i: int, size: int, cp_rank: int, ranks: Ranks) -> int:
    """Where local slot ``i`` of a sequence padded to ``size`` lies in it."""
    local = size // ranks.cp
    if not ranks.zigzag or ranks.cp == 1:
        return cp_rank * local + i
    half = local // 2
    return cp_rank * half + i if i < half else size - (cp_rank + 1) * half + i - half


@given(lengths, every_rank)
@example([1, 1], Ranks(cp=2, zigzag=False))
def test_every_token_but_the_first_is_predicted_once_by_the_one_before(
    seq_lens: list[int], ranks: Ranks
) -> None:
    pairs = [
        (reads, predicts)
        for layout in ranks.layouts(seq_lens)[:: ranks.tp]
        for reads, predicts in zip(layout.tokens.tolist(), layout.targets.tolist(), strict=True)
        if predicts != PAD
    ]
    starts = {sum(seq_lens[:i]) for i in range(len(seq_lens))}
    assert all(predicts == reads + 1 for reads, predicts in pairs)
    assert sorted(p for _, p in pairs) == [t for t in range(sum(seq_lens)) if t not in starts]


@given(lengths, every_rank)
@example([5, 6], Ranks(cp=2, zigzag=False))
@example([5, 6], Ranks(tp=2, align=128))
def test_boundaries_cover_all_slots_and_cut_evenly(seq_lens: list[int], ranks: Ranks) -> None:
    layout = ranks.layouts(seq_lens)[0]
    padded = layout.cu_seqlens.diff().tolist()
    chunks = ranks.cp * (2 if ranks.zigzag and ranks.cp > 1 else 1)
    assert int(layout.cu_seqlens[-1]) == len(layout.tokens) * ranks.cp
    assert all(size >= n for size, n in zip(padded, seq_lens or [0], strict=True))
    assert layout.max_seqlen == max(padded)
    assert all(size % chunks == 0 for size in padded)
    assert all(size < n + chunks for size, n in zip(padded[:-1], seq_lens, strict=False)), (
        "only the last sequence carries the padding of the sum"
    )


def test_the_sum_is_aligned_and_not_each_sequence() -> None:
    layout = Ranks(tp=2, cp=2, align=16).layouts([3, 5, 9])[0]
    assert layout.cu_seqlens.tolist() == [0, 4, 12, 64]
    assert len(layout.tokens) == 32 and len(layout.routers) == 16


def test_contiguous_context_parallel_ranks_take_one_chunk() -> None:
    first, second = Ranks(cp=2, zigzag=False).layouts([4, 3])
    assert first.tokens.tolist() == [0, 1, 4, 5]
    assert second.tokens.tolist() == [2, 3, 6, PAD]


def test_context_parallel_ranks_take_a_chunk_from_each_end() -> None:
    first, second = Ranks(cp=2).layouts([8])
    assert first.tokens.tolist() == [0, 1, 6, 7]
    assert second.tokens.tolist() == [2, 3, 4, 5]


def test_no_sequence_is_one_padding_sequence_on_every_rank() -> None:
    for layout in Ranks(2, 2).layouts([]):
        assert len(layout.tokens) == 2
        assert (layout.tokens == PAD).all() and (layout.targets == PAD).all()


@given(lengths, sizes)
def test_take_gathers_and_pads(seq_lens: list[int], cp: int) -> None:
    values = torch.arange(sum(seq_lens)) * 10
    for layout in Ranks(cp=cp).layouts(seq_lens):
        expected = [-7 if t == PAD else 10 * t for t in layout.tokens.tolist()]
        assert gather_rows(values, layout.tokens, -7).tolist() == expected
