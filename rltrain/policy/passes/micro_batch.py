"""A micro-batch: some sequences of this rank's shard, laid out for its slots, on its device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rltrain.batch import Batch
from rltrain.parallel.token_layout import (
    PAD,
    TokenGrid,
    TokenLayout,
    gather_rows,
    layout_tokens,
    to_device,
)
from rltrain.policy.passes.replay import Target
from rltrain.routing.align import last_rows, router_targets


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Every ``[S]`` tensor it yields is gathered through one `TokenLayout`."""

    number: int  # within its pass
    batch: Batch  # the sequences of this micro-batch, on the CPU, without their routes
    shard: Batch  # all sequences of this rank: routes are gathered from it, not copied with a cut
    token_index: Tensor  # where its tokens lie in the shard  # [n]
    layout: TokenLayout
    device: torch.device
    has_gaps: bool  # False: of the shard's rows only last ones have no route

    @cached_property
    def input_ids(self) -> Tensor:
        tokens = gather_rows(self.batch.tokens, self.layout.tokens, 0)
        return to_device(tokens, self.device).unsqueeze(0)  # [1, S]

    @cached_property
    def position_ids(self) -> Tensor:
        lens = self.batch.seq_lens
        positions = torch.arange(int(lens.sum())) - (lens.cumsum(0) - lens).repeat_interleave(lens)
        positions = gather_rows(positions, self.layout.tokens, 0)
        return to_device(positions, self.device).unsqueeze(0)  # [1, S]

    @cached_property
    def target_ids(self) -> Tensor:
        return to_device(gather_rows(self.batch.tokens, self.layout.targets, 0), self.device)  # [S]

    @cached_property
    def packed_seq_params(self) -> PackedSeqParams:
        cu_seqlens = to_device(self.layout.cu_seqlens, self.device)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=self.layout.max_seqlen,
            max_seqlen_kv=self.layout.max_seqlen,
        )

    def at_targets(self, values: Tensor) -> Tensor:
        """A field of the batch, at the slots that yield a token's logprob.  # [n] -> [S]"""
        return to_device(gather_rows(values, self.layout.targets, 0), self.device)

    def route_targets(
        self, layers: Sequence[int], wanted: Sequence[int], num_experts: int, *, record: bool
    ) -> dict[int, Target]:
        """What each router must choose, by layer.

        A sequence's last token has no route. If only such rows have none, they get the experts of
        padding, because no later row reads their output: then no router has to choose. If routers'
        choices are recorded, these rows choose natively, too.

        Args:
            layers: the layers of the routes' layer dim, in its order
            wanted: those of them that are about to run
        """
        routes, mask = self.shard.require("replay_expert_indices", "replay_mask")
        assert routes.shape[1] == len(layers), (routes.shape, layers)
        index = gather_rows(self.token_index, self.layout.routers, PAD)
        known = gather_rows(mask, index, True)
        complete = not record and not (self.has_gaps and self._owes(known))
        replayed = None if complete else to_device(known, self.device)
        if complete:
            index = index.masked_fill(~known, PAD)
        experts = router_targets(routes.to(self.device), index, num_experts)
        if list(wanted) != list(layers):
            columns = torch.tensor([layers.index(x) for x in wanted], dtype=torch.int64)
            experts = experts.index_select(1, to_device(columns, self.device))
        by_layer = experts.transpose(0, 1).contiguous().unbind()  # L times [S, K]
        return {
            layer: Target(chosen, replayed) for layer, chosen in zip(wanted, by_layer, strict=True)
        }

    def _owes(self, known: Tensor) -> bool:
        """Whether a slot's router must choose though its token is not the last of a sequence."""
        unread = gather_rows(last_rows(self.batch.seq_lens), self.layout.routers, False)
        return bool((~known & ~unread).any())

    def scatter(self, slots: Tensor, index: Tensor, shard: Tensor) -> None:
        """Write per-slot values to where their tokens lie in the shard, in place."""
        real = index != PAD
        shard[self.token_index[index[real]]] = slots.to(shard.device)[real].to(shard)


def cut(
    shard: Batch, plan: Sequence[Sequence[int]], grid: TokenGrid, device: torch.device
) -> list[MicroBatch]:
    """Cut a shard by a plan of `rltrain.data.packing`: sequence numbers per micro-batch."""
    light = shard.with_fields(rollout_expert_indices=None, replay_expert_indices=None)
    mask = shard.replay_mask
    has_gaps = mask is not None and bool((~mask & ~last_rows(shard.seq_lens)).any())
    cuts = []
    for number, rows in enumerate(plan):
        part = light.select(rows)
        layout = layout_tokens(part.seq_lens.tolist(), grid)
        index = shard.token_index(rows)
        cuts.append(MicroBatch(number, part, shard, index, layout, device, has_gaps))
    return cuts
