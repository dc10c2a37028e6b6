"""Means over a response whose tokens may lie on several context-parallel ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.sequences import sequence_of
from rltrain.parallel.token_layout import gather_rows, to_device
from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.passes.micro_batch import MicroBatch


def sequence_mean(mb: MicroBatch, loss_weights: Tensor, mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """The function of `rltrain.algorithms.losses.loss_inputs.LossInputs` that has this name.

    What it returns is collective over the context-parallel ranks, and without gradient.

    Args:
        loss_weights: of the micro-batch's tokens; those with 0 are in no mean  # [n]
    """
    lens, counted = mb.batch.seq_lens, loss_weights != 0
    nowhere = len(lens)  # where padding slots and tokens out of the loss belong
    of_token = torch.where(counted, sequence_of(lens), nowhere)
    of_slot = to_device(gather_rows(of_token, mb.layout.targets, nowhere), mb.device)  # [S]
    count = to_device(of_token.bincount(minlength=nowhere + 1).clamp_min(1), mb.device)

    def mean(values: Tensor) -> Tensor:
        kept = torch.where(of_slot == nowhere, 0.0, values.detach().double())
        sums = torch.zeros(nowhere + 1, dtype=torch.float64, device=mb.device)
        sums.index_add_(0, of_slot, kept)
        if mesh.cp_size > 1:
            dist.all_reduce(sums, group=mesh.cp_group)
        return (sums / count)[of_slot].to(values.dtype)

    return mean
