"""How native routing compares with the rollout's: what a worker measures on sampled steps."""

from collections.abc import Sequence

import torch

from rltrain.batch import Batch
from rltrain.policy.passes.passes import Recorded
from rltrain.policy.types import NO_FLIP, NUM_PARTS, Agreement
from rltrain.routing.agreement import flipped_before, num_shared
from rltrain.routing.codec import decode
from rltrain.routing.flips import judged_rows


def agree(
    shard: Batch,
    recorded: Recorded,
    layers: Sequence[int],
    num_layers: int,
    num_experts: int,
) -> Agreement:
    """Compare over the rows whose routes were captured.

    Args:
        layers: of this pipeline stage, those with a router; may be none
        num_layers: of the whole model
    """
    routes, mask = shard.require("rollout_expert_indices", "route_mask")
    k, captured = routes.shape[2], decode(routes)
    shared = num_shared(decode(recorded.native), captured)  # [N, L]
    shared = torch.where(mask.unsqueeze(1), shared, k)
    differs = shared < k
    lens = shard.seq_lens
    flipped, first = torch.zeros_like(mask), torch.full_like(shard.tokens, NO_FLIP)
    if layers:
        read_above = layers[-1] < num_layers - 1
        flipped = flipped_before(differs, lens, read_above=read_above)
        lowest = torch.tensor(layers)[differs.int().argmax(1)]
        first = torch.where(differs.any(1), lowest, first)
    # Which part of its sequence a row lies in: the first of NUM_PARTS equal ones, the second, ...
    position = torch.arange(len(mask)) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    part = position * NUM_PARTS // lens.repeat_interleave(lens)
    by_part = [mask & (part == i) for i in range(NUM_PARTS)]
    response = captured[mask & shard.response_mask].long()
    return Agreement(
        num_rows=int(mask.sum()),
        shared=dict(zip(layers, shared[mask].sum(0).tolist(), strict=True)),
        gate_mass=dict(zip(layers, recorded.gate_mass[mask].sum(0).tolist(), strict=True)),
        part_rows=tuple(int(rows.sum()) for rows in by_part),
        part_shared=tuple(int(shared[rows].sum()) for rows in by_part),
        flipped=flipped,
        first_flip=first,
        load={
            layer: response[:, i].flatten().bincount(minlength=num_experts)
            for i, layer in enumerate(layers)
        },
        num_judged=int(judged_rows(mask, lens).sum()) if recorded.flips is not None else 0,
        flips=recorded.flips or {},
    )


def kept_of_replayed(shard: Batch, recorded: Recorded) -> tuple[int, int]:
    """How many experts of the rollout were used, in this stage's layers, and how many there are."""
    routes, mask = shard.require("rollout_expert_indices", "route_mask")
    shared = num_shared(decode(recorded.used), decode(routes))[mask]
    return int(shared.sum()), shared.numel() * routes.shape[2]
