"""Cuts mini-batches into micro-batches, the same number on every data-parallel rank.

Expert-parallel groups span data-parallel ranks. If one rank had fewer micro-batches, the others
would wait forever in an all-to-all. Invariants (tested): every sequence is in exactly one
micro-batch; no micro-batch is over budget; every rank has the same number of micro-batches. A rank
with too few sequences runs empty micro-batches, which contain only padding."""

from collections.abc import Sequence
from dataclasses import dataclass

Plan = list[list[list[int]]]  # [dp rank][micro-batch] -> sequence numbers


@dataclass(frozen=True)
class StepPlan:
    """The sequences of each data-parallel rank in a step, and their micro-batches.

    Sequence numbers of ``scoring`` and ``updates`` count within the rank's ``shards`` entry.
    """

    shards: list[list[int]]  # [dp rank] -> sequences of the batch
    scoring: Plan  # the log-probability passes
    updates: list[Plan]  # [mini-batch]


def plan_step(
    seq_lens: Sequence[int],
    mini_batches: int,
    dp_size: int,
    max_tokens: int,
    multiple_of: int = 1,
    *,
    scoring_tokens: int | None = None,
) -> StepPlan:
    """Cut a step into mini-batches of sequences, in order, and those into micro-batches.

    A sequence stays on one rank for the whole step. So routes that are recorded in the
    log-probability pass need not be sent to another rank for the update.

    Args:
        scoring_tokens: token budget of a micro-batch without gradients; None: ``max_tokens``
        multiple_of: divisor of the number of micro-batches, for interleaved pipeline schedules

    Raises:
        ValueError: a sequence alone is over budget.
    """
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    updates = []
    start = 0
    for size in mini_batch_sizes(len(seq_lens), mini_batches):
        ranks = balance(seq_lens[start : start + size], dp_size)
        plan = pack_micro_batches(
            [[seq_lens[start + r] for r in rank] for rank in ranks], max_tokens, multiple_of
        )
        held = [len(shard) for shard in shards]
        updates.append([[[held[d] + i for i in mb] for mb in cuts] for d, cuts in enumerate(plan)])
        for shard, rank in zip(shards, ranks, strict=True):
            shard.extend(start + r for r in rank)
        start += size
    lens = [[seq_lens[r] for r in shard] for shard in shards]
    scoring = pack_micro_batches(lens, scoring_tokens or max_tokens, multiple_of)
    return StepPlan(shards, scoring, updates)


def mini_batch_sizes(num_sequences: int, mini_batches: int) -> list[int]:
    """Number of sequences of each mini-batch. If they cannot be equal, the first have one more."""
    size, rest = divmod(num_sequences, mini_batches)
    return [size + (i < rest) for i in range(mini_batches)]


def pack_micro_batches(
    seq_lens: Sequence[Sequence[int]], max_tokens: int, multiple_of: int = 1
) -> Plan:
    """Micro-batches of at most ``max_tokens`` for every rank, the same number on each."""
    packed = [_first_fit(lens, max_tokens) for lens in seq_lens]
    count = max(1, *(len(cuts) for cuts in packed)) if packed else 1
    count += -count % multiple_of
    return [_split_to(cuts, lens, count) for cuts, lens in zip(packed, seq_lens, strict=True)]


def balance(seq_lens: Sequence[int], parts: int) -> list[list[int]]:
    """Spread sequences over parts, longest first to the part with the fewest tokens."""
    rows: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for row in sorted(range(len(seq_lens)), key=lambda r: (-seq_lens[r], r)):
        part = min(range(parts), key=lambda p: (load[p], p))
        rows[part].append(row)
        load[part] += seq_lens[row]
    return [sorted(part) for part in rows]


def _first_fit(seq_lens: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    space: list[int] = []
    for row in sorted(range(len(seq_lens)), key=lambda r: (-seq_lens[r], r)):
        if seq_lens[row] > max_tokens:
            raise ValueError(
                f"a sequence has {seq_lens[row]} tokens, more than a micro-batch may hold "
                f"({max_tokens}): raise policy.max_tokens_per_micro_batch"
                " [RL1005]"
            )
        fit = next((i for i, free in enumerate(space) if free >= seq_lens[row]), None)
        if fit is None:
            bins.append([])
            space.append(max_tokens)
            fit = len(bins) - 1
        bins[fit].append(row)
        space[fit] -= seq_lens[row]
    return [sorted(rows) for rows in bins]


def _split_to(bins: list[list[int]], seq_lens: Sequence[int], count: int) -> list[list[int]]:
    """Halve the fullest micro-batches until there are ``count``; then pad with empty ones."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max(bins, key=len, default=[])
        if len(fullest) < 2:
            bins.append([])
            continue
        bins.remove(fullest)
        halves = balance([seq_lens[r] for r in fullest], 2)
        bins.extend([fullest[i] for i in half] for half in halves)
    return bins
