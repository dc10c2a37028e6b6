"""Deficits: how far the scores of replayed experts lie below those of the router's own choice.

Rounding swaps experts whose scores are nearly equal. A route of another token, layer or sample
contains experts whose scores are far apart. The deficit of each expert tells the two cases apart.

Deficits are in units of the router's logits. A difference of sigmoid gates is divided by the slope
of the gate. A difference of probabilities is taken between their logarithms. A deficit is stored as
one byte, the number of its quarter-octave bin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.routing.expert_groups import score_groups, within_groups

NUM_BINS = 128
"""Bin 0 is no deficit. Bin 1 is everything below the second edge. The last bin has no upper
edge."""
_BINS_PER_OCTAVE, _LOWEST_OCTAVE = 4, -21
REPLAYED = 128
"""Added to the byte of a runner-up that was replayed."""
MIN_SLOPE = 1e-3
"""Minimum slope of a sigmoid gate. It limits the deficits of saturated gates."""
MIN_RUNNERS_UP = 4


class Deficits(NamedTuple):
    """Deficits of replayed experts against the router's own choice."""

    experts: Tensor  # the replayed experts, int64  # [S, K]
    bins: Tensor  # the bin of the deficit of each expert, uint8  # [S, K]
    runners_up: Tensor  # of the best experts outside the native choice, uint8  # [S, M]
    """Bin of the distance below the weakest chosen expert, plus `REPLAYED` if it was replayed."""
    spread: Tensor  # standard deviation of the logits over experts, fp32  # [S]


def deficits(
    scores: Tensor,
    experts: Tensor,
    *,
    gates: Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    best: int = 2,
) -> Deficits:
    """The deficit of every replayed expert: how far its score is below that of a chosen expert.

    Without group limits, the score is compared with the K-th best score. With group limits, the
    deficit is the larger of two. The first is that of the expert's group against the weakest chosen
    group, divided by the number of scores that a group sums, as in `choice_margin`. The second is
    that of the expert against the K best experts in the groups of the replayed experts. So a narrow
    swap of groups gives narrow deficits, although it replaces many experts.

    Args:
        scores: what the router compares, of all experts, in logits or log-probabilities, or
            sigmoid gates with a bias if ``gates`` is not None  # [S, E]
        experts: replayed ids, distinct within a row, int64  # [S, K]
        gates: sigmoid gates without the bias  # [S, E]
        num_groups, group_topk: as Megatron's router has them
        best: how many experts score a group (`rltrain.routing.expert_groups.BEST_OF_GROUP`)
    """
    scores, k = scores.float(), experts.shape[1]
    slopes, logits = None, scores
    if gates is not None:
        gates = gates.float()
        slopes = (gates * (1 - gates)).clamp_min(MIN_SLOPE)
        logits = gates.logit(eps=1e-6)
    count = min(k + max(k, MIN_RUNNERS_UP), scores.shape[1])
    if num_groups and group_topk:
        of_groups = score_groups(scores, num_groups, best)
        size = scores.shape[1] // num_groups
        groups = experts // size
        used = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, groups, True)
        allowed = scores.masked_fill(~used.repeat_interleave(size, dim=1), -torch.inf)
        weakest = _gather(allowed.topk(k, dim=1), k - 1)
        group_slopes = None if slopes is None else score_groups(slopes, num_groups, best) / best
        last = _gather(of_groups.topk(group_topk, dim=1), group_topk - 1)
        of_group = _below(last, of_groups, groups, group_slopes) / best
        deficit = torch.maximum(_below(weakest, scores, experts, slopes), of_group)
        ranked = within_groups(scores, of_groups, group_topk).topk(count, dim=1)
        same_groups = (of_group == 0).all(1, keepdim=True)
    else:
        ranked = scores.topk(count, dim=1)
        deficit = _below(_gather(ranked, k - 1), scores, experts, slopes)
        same_groups = None
    after = ranked.indices[:, k:]
    distance = _below(_gather(ranked, k - 1), scores, after, slopes)
    if same_groups is not None:  # runners-up compare within the same groups only
        distance = distance.masked_fill(~same_groups | ranked.values[:, k:].isinf(), torch.inf)
    was_given = (after.unsqueeze(-1) == experts.unsqueeze(1)).any(-1)
    if same_groups is not None:
        was_given &= same_groups
    runners_up = bins(distance).clamp_min(1) + was_given.to(torch.uint8) * REPLAYED
    return Deficits(experts, bins(deficit), runners_up, logits.std(dim=1, unbiased=False))


def bins(deficits: Tensor) -> Tensor:
    """The bin of each deficit: 0 for 0, the last for NaN.  # float -> uint8"""
    octaves = torch.nan_to_num(deficits, nan=torch.inf).log2()
    numbers = ((octaves - _LOWEST_OCTAVE) * _BINS_PER_OCTAVE).floor().clamp(0, NUM_BINS - 2) + 1
    return torch.where(deficits == 0, 0, numbers).to(torch.uint8)


def upper_edges() -> Tensor:
    """The upper edge of each bin: 0 for bin 0, inf for the last.  # float64 [bins]"""
    ends = torch.arange(NUM_BINS, dtype=torch.float64) / _BINS_PER_OCTAVE + _LOWEST_OCTAVE
    edges = torch.exp2(ends)
    edges[0], edges[-1] = 0.0, torch.inf
    return edges


def _gather(top: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Score and index at one rank of a top-k.  # [S, 1] each"""
    values, indices = top
    return values[:, rank : rank + 1], indices[:, rank : rank + 1]


def _below(
    weakest: tuple[Tensor, Tensor], scores: Tensor, at: Tensor, slopes: Tensor | None
) -> Tensor:
    """How far the scores at ``at`` are below the weakest chosen one, at least 0.  # [S, ...]"""
    deficit = (weakest[0] - scores.gather(1, at)).clamp_min(0)
    if slopes is None:
        return deficit
    return deficit / torch.maximum(slopes.gather(1, weakest[1]), slopes.gather(1, at))
