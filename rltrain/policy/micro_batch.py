"""A micro-batch: some sequences of this rank's shard, laid out for its slots, on its device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rltrain.batch import Batch
from rltrain.parallel.tokens import PAD, TokenGrid, TokenLayout, layout_tokens, take
from rltrain.policy.replay import Target
from rltrain.routing.align import last_rows, router_targets, spread_


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Every ``[S]`` tensor it yields is gathered through one `TokenLayout`."""

    number: int  # within its pass
    batch: Batch  # the sequences of this micro-batch, on the CPU, without their routes
    shard: Batch  # all sequences of this rank: routes are gathered from it, not copied with a cut
    token_index: Tensor  # where its tokens lie in the shard  # [n]
    layout: TokenLayout
    device: torch.device

    @cached_property
    def input_ids(self) -> Tensor:
        tokens = take(self.batch.tokens, self.layout.tokens, 0)
        return to_device(tokens, self.device).unsqueeze(0)  # [1, S]

    @cached_property
    def position_ids(self) -> Tensor:
        lens = self.batch.seq_lens
        positions = torch.arange(int(lens.sum())) - (lens.cumsum(0) - lens).repeat_interleave(lens)
        positions = take(positions, self.layout.tokens, 0)
        return to_device(positions, self.device).unsqueeze(0)  # [1, S]

    @cached_property
    def target_ids(self) -> Tensor:
        return to_device(take(self.batch.tokens, self.layout.targets, 0), self.device)  # [S]

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
        return to_device(take(values, self.layout.targets, 0), self.device)

    def route_targets(
        self, layers: Sequence[int], wanted: Sequence[int], num_experts: int, *, record: bool
    ) -> dict[int, Target]:
        """What each router must choose, by layer.

        Where only last tokens owe no route, they get experts as padding does, and no router has to
        choose: nothing reads what they become. Not so where it is recorded what routers choose.

        Args:
            layers: the layers of the routes' layer dim, in its order
            wanted: those of them that are about to run
        """
        routes, mask = self.shard.require("replay_expert_indices", "replay_mask")
        assert routes.shape[1] == len(layers), (routes.shape, layers)
        rows = take(self.token_index, self.layout.routers, PAD)
        experts, replayed = router_targets(routes, mask, rows, num_experts)
        live = ~replayed
        unread = take(last_rows(self.batch.seq_lens), self.layout.routers, False)
        complete = not record and not (live & ~unread).any()
        if complete:
            spread_(experts, live, num_experts)
        of_rows = None if complete else to_device(replayed, self.device)
        # One copy for all layers; each router casts its own slice when it gets there.
        own = experts.transpose(0, 1)[[layers.index(layer) for layer in wanted]]  # [L, S, K]
        by_layer = to_device(own.contiguous(), self.device)
        return {layer: Target(by_layer[i], of_rows) for i, layer in enumerate(wanted)}

    def scatter(self, slots: Tensor, index: Tensor, shard: Tensor) -> None:
        """Write per-slot values to where their tokens lie in the shard, in place."""
        real = index != PAD
        shard[self.token_index[index[real]]] = slots.to(shard.device)[real].to(shard)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy that the CPU does not wait for."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def cut(
    shard: Batch, plan: Sequence[Sequence[int]], grid: TokenGrid, device: torch.device
) -> list[MicroBatch]:
    """Cut a shard by a plan of `rltrain.data.packing`: sequence numbers per micro-batch."""
    light = shard.with_fields(rollout_expert_indices=None, replay_expert_indices=None)
    cuts = []
    for number, rows in enumerate(plan):
        part = light.select(rows)
        layout = layout_tokens(part.seq_lens.tolist(), grid)
        cuts.append(MicroBatch(number, part, shard, shard.token_index(rows), layout, device))
    return cuts
