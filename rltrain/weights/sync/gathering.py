"""Collect the shards of a tensor on the ranks that need them."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.weights.mapping.grid import AxisPosition


@dataclass(frozen=True)
class Gathering:
    """
    Args:
        rank: this process's, in the default group
        roots: ranks that need whole tensors; None: all of them
    """

    rank: int = 0
    roots: Collection[int] | None = None

    def collect(self, shard: Tensor, axis: AxisPosition) -> list[Tensor] | None:
        """The shards of all ranks of the axis, in their order; None where nobody needs them.

        Collective over the axis. With one root a shard goes to it alone. Where no rank of the axis
        is a root, nothing moves.
        """
        if axis.size == 1:
            return [shard] if self.roots is None or self.rank in self.roots else None
        if self.roots is None:
            return all_gather(shard, axis)
        ranks = dist.get_process_group_ranks(axis.group)
        wanted = [position for position, rank in enumerate(ranks) if rank in self.roots]
        is_root = axis.rank in wanted
        if len(wanted) == 1:
            gathered = [torch.empty_like(shard) for _ in ranks] if is_root else None
            dist.gather(shard, gathered, group=axis.group, group_dst=wanted[0])
            return gathered
        gathered = all_gather(shard, axis) if wanted else None
        return gathered if is_root else None


def all_gather(shard: Tensor, axis: AxisPosition) -> list[Tensor]:
    if axis.size == 1:
        return [shard]
    gathered = [torch.empty_like(shard) for _ in range(axis.size)]
    dist.all_gather(gathered, shard, group=axis.group)
    return gathered
