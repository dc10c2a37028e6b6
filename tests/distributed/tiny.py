"""A tiny model with the same weights in every layout, and one pass of a fixed batch over it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rltrain.config.policy import ParallelConfig
from rltrain.verification.layout_case import SEQ_LENS
from rltrain.verification.layout_models import QWEN3_LIKE

if TYPE_CHECKING:  # it imports Megatron, which only the ranks need
    from rltrain.policy.megatron.mesh import Mesh

# The model of `rltrain verify`, with a dense layer between two with experts.
ARCH = replace(QWEN3_LIKE, num_layers=3, moe_layers=(0, 2))
LENGTHS = SEQ_LENS


@dataclass(frozen=True)
class Layout:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sequences_per_micro_batch: int = 2


def sequences(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in LENGTHS]


@dataclass(frozen=True)
class Packed:
    """Sequences end to end, and after them as much padding as makes ``tp`` divide the length."""

    ids: tuple[int, ...]
    tokens: Tensor  # [t]
    lengths: list[int]  # the padding is a sequence of its own


def micro_batches(layout: Layout, mesh: "Mesh") -> Iterator[Packed]:
    every = sequences(ARCH.vocab_size)
    share = len(every) // mesh.dp_size
    first = mesh.dp_rank * share
    for start in range(first, first + share, layout.sequences_per_micro_batch):
        ids = tuple(range(start, start + layout.sequences_per_micro_batch))
        tokens = torch.cat([every[i] for i in ids])
        padding = -len(tokens) % mesh.tp_size
        lengths = [len(every[i]) for i in ids] + [padding] * (padding > 0)
        yield Packed(ids, torch.cat([tokens, tokens.new_zeros(padding)]), lengths)


def forward_backward(
    chunks: Sequence[nn.Module], layout: Layout, mesh: "Mesh"
) -> tuple[dict[int, Tensor], Tensor]:
    """Mean cross entropy over all next tokens of the batch, through Megatron's own schedule.

    Returns the logits [t, vocabulary] of this rank's sequences, by number, and the global loss.
    """
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = list(micro_batches(layout, mesh))
    denominator = sum(LENGTHS) - len(LENGTHS)
    found: dict[int, Tensor] = {}
    total = torch.zeros(())

    def loss(packed: Packed, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal total
        whole = _gather_vocabulary(output[0], mesh).float()
        parts = whole.split(packed.lengths)
        tokens = packed.tokens.split(packed.lengths)
        for i, part in zip(packed.ids, parts, strict=False):
            found[i] = part.detach().clone()
        value = sum(
            F.cross_entropy(part[:-1], t[1:], reduction="sum") / denominator
            for _, part, t in zip(packed.ids, parts, tokens, strict=False)
        )
        total = total + value.detach()
        return value * len(batches) * mesh.dp_size, {}

    def step(iterator: Iterator[Packed], chunk: nn.Module) -> tuple[Tensor, Any]:
        packed = next(iterator)
        ends = torch.tensor([0, *packed.lengths]).cumsum(0).int()
        longest = max(packed.lengths)
        params = PackedSeqParams("thd", ends, ends, None, None, longest, longest)
        tokens = packed.tokens.unsqueeze(0)
        output = chunk(tokens, torch.zeros_like(tokens), None, packed_seq_params=params)
        return output, partial(loss, packed)

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
    )
    torch.distributed.all_reduce(total, group=mesh.dp_group)
    return found, total


def _gather_vocabulary(logits: Tensor, mesh: "Mesh") -> Tensor:
    """[t, padded / tp] of each rank -> [t, vocabulary]"""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits, mesh.tp_group)[:, : ARCH.vocab_size]
