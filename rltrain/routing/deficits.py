"""How far below a router's own choice the experts lie that it was given.

Rounding swaps experts whose scores are nearly equal. A route of another token, layer or sample
names experts whose scores are far apart. So the distance tells the two apart, expert by expert.

A distance is in units of the router's logits, whatever the router compares: a difference of
sigmoid gates is divided by the gate's slope, one of probabilities is taken of their logarithms.
It travels as a byte, the quarter octave in which it lies.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.routing.expert_groups import score_groups, within_groups

NUM_BINS = 128
"""0 is no deficit; 1 is everything below the second edge; the last has no upper edge."""
_BINS_PER_OCTAVE, _LOWEST_OCTAVE = 4, -21
REPLAYED = 128
"""Marks the byte of a runner-up that was replayed."""
MIN_SLOPE = 1e-3
"""Of a sigmoid, below which a gate counts as saturated; this makes its deficits smaller."""
MIN_RUNNERS_UP = 4


class Deficits(NamedTuple):
    """Of the experts that a router was given, against its own choice."""

    experts: Tensor  # the given ones, int64  # [S, K]
    bins: Tensor  # the bin of the deficit of each expert, uint8  # [S, K]
    runners_up: Tensor  # of the best experts outside the native choice, uint8  # [S, M]
    """Bin of the distance below the weakest chosen expert, plus `REPLAYED` if it was given."""
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
    """Of every given expert: how far its score is below what would have made it chosen.

    Without group limits that is the weakest of the K best scores. With them a group counts first:
    an expert of a group that was not chosen has the deficit of its group against the weakest
    chosen one, shared out over the scores that a group adds up, as in `choice_margin`. Within
    groups an expert is compared with the K best of the groups that the given experts lie in. So
    a narrow swap of groups gives narrow deficits, though it replaces many experts.

    Args:
        scores: what the router compares, of all experts, in logits or log-probabilities, or
            sigmoid gates with a bias if ``gates`` is given  # [S, E]
        experts: ids to judge, distinct within a row, int64  # [S, K]
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
    if same_groups is not None:  # another group's experts replace others for its own reasons
        distance = distance.masked_fill(~same_groups | ranked.values[:, k:].isinf(), torch.inf)
    was_given = (after.unsqueeze(-1) == experts.unsqueeze(1)).any(-1)
    if same_groups is not None:
        was_given &= same_groups
    runners_up = bins(distance).clamp_min(1) + was_given.to(torch.uint8) * REPLAYED
    return Deficits(experts, bins(deficit), runners_up, logits.std(dim=1, unbiased=False))


def bins(deficits: Tensor) -> Tensor:
    """The bin of each deficit, 0 for 0; NaN lies in the last.  # float, uint8"""
    octaves = torch.nan_to_num(deficits, nan=torch.inf).log2()
    numbers = ((octaves - _LOWEST_OCTAVE) * _BINS_PER_OCTAVE).floor().clamp(0, NUM_BINS - 2) + 1
    return torch.where(deficits == 0, 0, numbers).to(torch.uint8)


def upper_edges() -> Tensor:
    """The deficit below which each bin ends: 0 for bin 0, inf for the last.  # float64 [bins]"""
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
    """How far the scores at ``at`` lie below a weakest one, at least 0.  # [S, ...]"""
    deficit = (weakest[0] - scores.gather(1, at)).clamp_min(0)
    if slopes is None:
        return deficit
    return deficit / torch.maximum(slopes.gather(1, weakest[1]), slopes.gather(1, at))
