"""Cut a mini-batch into micro-batches, equally many on every data-parallel rank.

Expert-parallel groups span data-parallel ranks, so a rank with one micro-batch fewer would leave
the others waiting in an all-to-all for ever. Invariants (tested): every sequence is in exactly one
micro-batch; no micro-batch is over budget; every rank has the same number of them. A rank with too
few sequences runs empty micro-batches, which are padding and count nowhere.
"""

from collections.abc import Sequence

Plan = list[list[list[int]]]  # [dp rank][micro-batch] -> sequence numbers


def plan_micro_batches(seq_lens: Sequence[int], dp_size: int, max_tokens: int, multiple_of: int = 1) -> Plan:
    """Assign sequences to ranks by tokens, then to micro-batches of at most ``max_tokens``.

    Args:
        multiple_of: what an interleaved pipeline schedule needs the count to divide by.

    Raises:
        ValueError: a sequence alone is over budget.
    """
    ranks = balance(seq_lens, dp_size)
    packed = [_first_fit(rank, seq_lens, max_tokens) for rank in ranks]
    count = max(1, *(len(rank) for rank in packed))
    count += -count % multiple_of
    return [_split_to(rank, seq_lens, count) for rank in packed]


def balance(seq_lens: Sequence[int], parts: int) -> list[list[int]]:
    """Spread sequences over parts, longest first to the part with the fewest tokens."""
    rows: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for row in sorted(range(len(seq_lens)), key=lambda r: (-seq_lens[r], r)):
        part = min(range(parts), key=lambda p: (load[p], p))
        rows[part].append(row)
        load[part] += seq_lens[row]
    return [sorted(part) for part in rows]


def _first_fit(rows: Sequence[int], seq_lens: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    space: list[int] = []
    for row in sorted(rows, key=lambda r: (-seq_lens[r], r)):
        if seq_lens[row] > max_tokens:
            raise ValueError(
                f"sequence {row} has {seq_lens[row]} tokens, more than a micro-batch may hold "
                f"({max_tokens}): raise policy.max_tokens_per_micro_batch"
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
    bins = [list(rows) for rows in bins]
    while len(bins) < count:
        fullest = max(bins, key=len, default=[])
        if len(fullest) < 2:
            bins.append([])
            continue
        bins.remove(fullest)
        bins.extend(_halve(fullest, seq_lens))
    return bins


def _halve(rows: list[int], seq_lens: Sequence[int]) -> list[list[int]]:
    halves = balance([seq_lens[r] for r in rows], 2)
    return [[rows[i] for i in half] for half in halves]
