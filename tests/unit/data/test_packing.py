"""The plan of a step: complete, within budget, equally many micro-batches on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.packing import balance, mini_batch_sizes, pack_micro_batches, plan_step

steps = st.tuples(
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(30, 90),
)


@given(steps, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]))
def test_plan(step: tuple[int, list[int], int], dp: int, multiple_of: int) -> None:
    mini_batches, lens, budget = step
    lens = lens * mini_batches
    plan = plan_step(lens, mini_batches, dp, budget, multiple_of)

    held = sorted(row for shard in plan.shards for row in shard)
    assert held == list(range(len(lens))), "every sequence is on exactly one rank"

    for cuts in [plan.scoring, *plan.updates]:
        assert len({len(rank) for rank in cuts}) == 1, "ranks run equally many micro-batches"
        assert len(cuts[0]) % multiple_of == 0
        for rank, shard in zip(cuts, plan.shards, strict=True):
            for rows in rank:
                assert sum(lens[shard[i]] for i in rows) <= budget

    scored = [sorted(i for mb in rank for i in mb) for rank in plan.scoring]
    assert scored == [list(range(len(shard))) for shard in plan.shards]

    size = len(lens) // mini_batches
    for number, cuts in enumerate(plan.updates):
        rows = sorted(plan.shards[d][i] for d, rank in enumerate(cuts) for mb in rank for i in mb)
        assert rows == list(range(number * size, (number + 1) * size)), (
            "mini-batches keep the order"
        )


def test_scoring_has_a_budget_of_its_own() -> None:
    plan = plan_step([5, 5, 5, 5], 1, 1, 10, scoring_tokens=20)
    assert plan.scoring == [[[0, 1, 2, 3]]]
    assert [len(rank) for rank in plan.updates[0]] == [2]


def test_ranks_of_unequal_load_run_equally_many() -> None:
    """One sequence against three: alone the ranks would need 1 and 3 micro-batches."""
    plan = pack_micro_batches([[10], [10, 10, 10]], max_tokens=10)
    assert [len(rank) for rank in plan] == [3, 3]
    assert sorted(map(len, plan[0])) == [0, 0, 1], "the short rank runs empty micro-batches"


def test_a_sequence_over_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 11 tokens, more than a micro-batch may hold \(10\)"):
        pack_micro_batches([[11]], max_tokens=10)


def test_what_does_not_divide_is_spread_over_the_first_mini_batches() -> None:
    plan = plan_step([1, 1, 1, 1, 1], 3, 1, 10)
    assert plan.updates == [[[[0, 1]]], [[[2, 3]]], [[[4]]]]
    assert mini_batch_sizes(2, 3) == [1, 1, 0]


def test_ranks_get_tokens_alike_and_not_sequences() -> None:
    assert balance([9, 1, 1, 1, 8, 4], 2) == [[0, 1, 2, 3], [4, 5]]
