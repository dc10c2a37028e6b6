"""The token layout: which slot of which rank holds each token of a micro-batch.

One function computes the index. Tokens, targets, masks and routes are all gathered with it, so
they cannot be sliced differently. Invariants (tested): over all ranks the real slots are a
permutation of the tokens, all ranks hold equally many slots, and gather then scatter is the
identity.
"""

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

PAD = -1


@dataclass(frozen=True)
class TokenGrid:
    """A rank's place among those that share one data-parallel rank's tokens, and its alignment.

    ``align`` divides the number of slots of a rank, after context and sequence parallelism. FP8
    matrix products need it. They see one matrix of all slots, so the sum is padded once, not each
    sequence. Transformer Engine needs 16 for delayed and per-tensor scaling (it asserts 8, but the
    GEMM of its weight gradient needs 16), 32 for mxfp8, and 128 for blockwise scaling, where a
    scale spans 128 slots. Megatron pads the tokens of each expert by itself.
    """

    tp_size: int = 1
    tp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    align: int = 1
    zigzag: bool = True  # what Megatron's rotary embedding and Transformer Engine assume

    @property
    def seq_align(self) -> int:
        """Context parallelism cuts every sequence into equal chunks: 2 per rank in a zigzag."""
        return self.cp_size * (2 if self.zigzag and self.cp_size > 1 else 1)

    @property
    def total_align(self) -> int:
        """Sequence parallelism cuts the local slots into tp parts, each a multiple of ``align``."""
        return lcm(self.seq_align, self.cp_size * self.tp_size * self.align)


@dataclass(frozen=True)
class TokenLayout:
    """The slots of one rank for sequences laid end to end.

    ``tokens``, ``targets`` and ``routers`` hold token indices, PAD where a slot holds padding.
    """

    tokens: Tensor  # [S] the token each slot reads
    targets: Tensor  # [S] the token whose log-probability each slot yields: the next one
    routers: Tensor  # [S] or, under sequence parallelism, [S / tp]: the token each router row reads
    cu_seqlens: Tensor  # [B + 1] int32, padded sequence boundaries, global over context parallelism
    max_seqlen: int


def layout_tokens(seq_lens: list[int], grid: TokenGrid) -> TokenLayout:
    """Lay ``seq_lens`` out for one rank. No sequence at all gives one padding-only sequence."""
    padded = padded_lengths(seq_lens, grid)
    tokens, targets, start = [], [], 0
    for n, size in zip(seq_lens or [0], padded, strict=True):
        reads = torch.full((size,), PAD)
        reads[:n] = torch.arange(start, start + n)
        predicts = torch.full((size,), PAD)
        if n > 1:
            predicts[: n - 1] = torch.arange(start + 1, start + n)
        tokens.append(context_parallel_slice(reads, grid))
        targets.append(context_parallel_slice(predicts, grid))
        start += n
    index = torch.cat(tokens)
    return TokenLayout(
        tokens=index,
        targets=torch.cat(targets),
        routers=index.chunk(grid.tp_size)[grid.tp_rank],
        cu_seqlens=torch.tensor([0, *torch.tensor(padded).cumsum(0).tolist()], dtype=torch.int32),
        max_seqlen=max(padded),
    )


def padded_lengths(seq_lens: list[int], grid: TokenGrid) -> list[int]:
    """The number of slots of each sequence, over all ranks that share it."""
    padded = [n + -n % grid.seq_align for n in seq_lens] or [0]
    padded[-1] += -sum(padded) % grid.total_align
    if sum(padded) == 0:
        padded[-1] = grid.total_align
    return padded


def context_parallel_slice(slots: Tensor, grid: TokenGrid) -> Tensor:
    """One rank's chunks of a sequence.

    With ``zigzag``, rank r gets chunk r from the front and chunk r from the back, which balances
    the work of causal attention. Otherwise it gets chunk r.
    """
    if not grid.zigzag or grid.cp_size == 1:
        return slots.chunk(grid.cp_size)[grid.cp_rank]
    chunks = slots.chunk(2 * grid.cp_size)
    return torch.cat([chunks[grid.cp_rank], chunks[-1 - grid.cp_rank]])


def gather_rows(values: Tensor, index: Tensor, pad: float | bool) -> Tensor:
    """Gather ``[N, ...]`` to ``[S, ...]``, with ``pad`` in padding slots."""
    # PAD is -1, so it indexes the row that is appended.
    return torch.cat((values, values.new_full((1, *values.shape[1:]), pad)))[index]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy that the CPU does not wait for."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
