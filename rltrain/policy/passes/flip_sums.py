"""Sums over a shard of how far the experts that routers were given lie below their own choice.

They stay on the device while there are micro-batches to start: nothing here waits for it.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.parallel.token_layout import gather_rows, to_device
from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.passes.micro_batch import MicroBatch
from rltrain.policy.passes.replay import RouterRecord
from rltrain.routing.flips import LayerFlips, judged_rows

_BYTES = 256
_STRIPES = 64
"""Copies of each counter; row r adds to copy ``r % _STRIPES``. Most rows have one of a few values,
and threads of a GPU that add to the same address wait for each other."""


class FlipSums:
    """`LayerFlips` of each layer, over the judged rows of every micro-batch that was added."""

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        self._row = {layer: i for i, layer in enumerate(layers)}
        self._num_experts = num_experts
        # Runners-up by byte, then rows by given expert.
        self._counts = torch.zeros(len(layers), _STRIPES, _BYTES + num_experts, dtype=torch.int64)
        self._spreads = torch.zeros(len(layers), dtype=torch.float64)

    def add(self, mb: MicroBatch, records: Mapping[int, RouterRecord]) -> None:
        if not records:
            return
        (mask,) = mb.batch.require("route_mask")
        of_rows = gather_rows(judged_rows(mask, mb.batch.seq_lens), mb.layout.routers, False)
        judged = to_device(of_rows.long(), mb.device).unsqueeze(1)  # [S, 1]
        stripes = torch.arange(len(judged), device=mb.device).unsqueeze(1) % _STRIPES  # [S, 1]
        self._counts = self._counts.to(mb.device)
        self._spreads = self._spreads.to(mb.device)
        for layer, record in records.items():
            deficits = record.deficits
            assert deficits is not None, f"layer {layer}: its targets were not compared"
            counts = self._counts[self._row[layer]]
            _count(counts, stripes, deficits.runners_up.long(), judged)
            _count(counts, stripes, deficits.experts + _BYTES, judged)
            self._spreads[self._row[layer]] += (deficits.spread * judged.squeeze(1)).double().sum()

    def summed(self, mesh: Mesh) -> dict[int, LayerFlips]:
        """By layer. Collective over the ranks that share the shard's tokens."""
        counts = self._counts.sum(1)
        if self._row and mesh.tp_size * mesh.cp_size > 1:
            dist.all_reduce(counts, group=mesh.tp_cp_group)
            dist.all_reduce(self._spreads, group=mesh.tp_cp_group)
        counts, spreads = counts.cpu(), self._spreads.tolist()
        return {
            layer: LayerFlips(counts[row, :_BYTES], spreads[row], counts[row, _BYTES:])
            for layer, row in self._row.items()
        }


def _count(counts: Tensor, stripes: Tensor, values: Tensor, judged: Tensor) -> None:
    """Add the number of judged rows of each value, in place.

    Args:
        counts: by stripe and value  # [stripes, V]
        stripes: to which one each row adds  # [S, 1]
        values: of each row, several, int64  # [S, ...]
        judged: 1 or 0  # [S, 1]
    """
    at = values + stripes * counts.shape[1]
    counts.view(-1).scatter_add_(0, at.flatten(), judged.expand(at.shape).flatten())
