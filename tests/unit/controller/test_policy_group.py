"""How the controller combines the answers of many workers. No worker runs here."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.cluster.policy_group import PolicyGroup, merge_stages
from rltrain.controller.cluster.worker_group import _add
from rltrain.data.packing import plan_step
from rltrain.parallel.token_layout import TokenGrid, layout_tokens, padded_lengths
from rltrain.policy.types import NO_FLIP, Agreement, StageScored, Updated
from rltrain.routing.flips import LayerFlips, WideFlips

LOGPROBS = torch.tensor([0.0, -1.0, -2.0])
FIRST = Agreement(
    num_rows=2,
    shared={0: 3, 1: 4},
    gate_mass={0: 1.5, 1: 2.0},
    part_rows=(1, 0, 1, 0),
    part_shared=(3, 0, 4, 0),
    flipped=torch.tensor([False, True, False]),
    first_flip=torch.tensor([NO_FLIP, 0, NO_FLIP]),
)
LAST = replace(
    FIRST,
    shared={2: 1},
    gate_mass={2: 0.5},
    part_shared=(1, 0, 0, 0),
    flipped=torch.tensor([False, False, True]),
    first_flip=torch.tensor([2, 2, NO_FLIP]),
)
DENSE = replace(
    FIRST,
    shared={},
    gate_mass={},
    part_shared=(0, 0, 0, 0),
    flipped=torch.zeros(3, dtype=torch.bool),
    first_flip=torch.full((3,), NO_FLIP),
)


def check_merged(found: Agreement | None) -> None:
    assert found is not None
    assert found.num_rows == 2 and found.part_rows == (1, 0, 1, 0)  # the same rows on all stages
    assert found.shared == {0: 3, 1: 4, 2: 1} and found.gate_mass == {0: 1.5, 1: 2.0, 2: 0.5}
    assert found.part_shared == (4, 0, 4, 0)
    assert found.flipped.tolist() == [False, True, True]
    assert found.first_flip.tolist() == [2, 0, NO_FLIP]


def test_stages_are_merged_by_layer() -> None:
    scored = merge_stages([StageScored(None, FIRST), StageScored(LOGPROBS, LAST)])
    assert scored.logprobs is LOGPROBS
    check_merged(scored.agreement)


def test_a_stage_of_dense_layers_adds_nothing() -> None:
    stages = [StageScored(None, DENSE), StageScored(None, FIRST), StageScored(LOGPROBS, LAST)]
    check_merged(merge_stages(stages).agreement)


def test_one_stage_is_itself() -> None:
    agreement = merge_stages([StageScored(LOGPROBS, LAST)]).agreement
    assert agreement is not None and agreement.shared == LAST.shared
    assert agreement.part_shared == LAST.part_shared
    assert torch.equal(agreement.first_flip, LAST.first_flip)


def test_without_a_measurement_there_are_log_probabilities_alone() -> None:
    scored = merge_stages([StageScored(None, None), StageScored(LOGPROBS, None)])
    assert scored.logprobs is LOGPROBS and scored.agreement is None


@pytest.mark.parametrize("logprobs", [(None, None), (LOGPROBS, LOGPROBS)])
def test_one_stage_alone_has_the_log_probabilities(logprobs: Any) -> None:
    with pytest.raises(ValueError, match="unpack"):
        merge_stages([StageScored(found, None) for found in logprobs])


# Shards


def test_what_shards_yield_is_put_back_in_the_order_of_the_batch() -> None:
    group = group_of([3, 5, 9, 2], 16, dp=2)
    assert group._plan.shards == [[2], [0, 1, 3]]
    found = group._unshard([torch.arange(8, 17), torch.tensor([*range(8), 17, 18])])
    assert torch.equal(found, torch.arange(19))


def test_who_speaks_for_a_shard_is_found_by_its_data_parallel_rank() -> None:
    group = group_of([3, 5], 16, dp=2)
    group._dp_ranks = [1, 0, 1, 0]
    assert group._by_dp_rank(["a", None, "b", "c"]) == [["c"], ["a", "b"]]


def test_sums_of_ranks_are_added_and_the_largest_kept() -> None:
    one = Updated(totals={"loss": 1.0}, maxima={"ratio_max": 2.0}, grad_norm=3.0, lr=0.1)
    other = replace(one, totals={"loss": 4.0}, maxima={"ratio_max": 5.0})
    assert _add([one, other]) == replace(other, totals={"loss": 5.0})


def test_agreements_of_shards_are_added_layer_by_layer() -> None:
    group = group_of([3, 3], 16, dp=2)
    merged = group._merge([replace(FIRST, load={0: torch.tensor([1, 2])})] * 2)
    assert merged.num_rows == 4 and merged.shared == {0: 6, 1: 8}
    assert merged.gate_mass == {0: 3.0, 1: 4.0}
    assert merged.part_rows == (2, 0, 2, 0) and merged.part_shared == (6, 0, 8, 0)
    assert merged.load[0].tolist() == [2, 4]
    assert merged.flipped.tolist() == [False, True, False] * 2
    assert merged.first_flip.tolist() == [NO_FLIP, 0, NO_FLIP] * 2


def flips_of(*rows: int) -> LayerFlips:
    counts = torch.tensor(rows)
    return LayerFlips(counts, float(counts.sum()), counts * 2)


def test_flips_are_joined_over_stages_and_added_over_ranks() -> None:
    first = replace(FIRST, num_judged=2, flips={0: flips_of(1, 2)})
    last = replace(LAST, num_judged=2, flips={2: flips_of(3, 4)})
    shard = merge_stages([StageScored(None, first), StageScored(LOGPROBS, last)]).agreement
    assert shard is not None and list(shard.flips) == [0, 2] and shard.num_judged == 2
    group = group_of([3, 3], 32, dp=2)
    merged = group._merge([shard, shard])
    assert merged.num_judged == 4
    assert merged.flips[2].runners_up.tolist() == [6, 8] and merged.flips[2].spread == 14
    assert merged.flips[0].uses.tolist() == [4, 8]


def test_wide_flips_are_told_by_where_their_tokens_lie_in_the_batch() -> None:
    """Shards take sequences in another order than the batch has."""
    group = group_of([4, 2, 3, 5], 32, dp=2)
    shards = group._plan.shards
    assert sorted(i for rows in shards for i in rows) == [0, 1, 2, 3]
    group._dp_ranks = [0, 0, 1, 1]  # two stages each
    lens = [4, 2, 3, 5]

    def of_rank(rank: int) -> WideFlips:
        """The first row of each sequence of the shard, its number there as the expert."""
        own = shards[rank // 2]
        rows = np.cumsum([0, *(lens[i] for i in own)])[:-1]
        layers = np.full(len(own), rank % 2)
        return WideFlips(rows, layers, np.zeros_like(rows), np.asarray(own))

    group._call = lambda write: [of_rank(rank) for rank in range(4)]  # type: ignore[method-assign]
    found = group.wide_flips({})
    starts = [0, 4, 6, 9]
    assert found.rows.tolist() == [start for start in starts for _ in range(2)]
    assert found.layers.tolist() == [0, 1] * 4
    assert found.experts.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# Padding

SIZES = st.sampled_from([1, 2, 4])


def group_of(lens: list[int], budget: int, **parallel: int) -> PolicyGroup:
    """A group that has cut a step and has no workers."""
    group = object.__new__(PolicyGroup)
    n = sum(lens)
    group._config = Config.model_validate({"policy": {"parallel": parallel}})
    group._batch = Batch(
        tokens=torch.zeros(n, dtype=torch.int64),
        seq_lens=torch.tensor(lens),
        response_mask=torch.ones(n, dtype=torch.bool),
    )
    group._plan = plan_step(lens, 1, parallel.get("dp", 1), budget)
    return group


def test_padding_is_a_share_of_all_rows() -> None:
    # Chunks of 4: 3 + 1 | 5 + 3 | 9 + 3; the sum, 24, is a multiple of cp * tp = 4.
    assert padded_lengths([3, 5, 9], TokenGrid(tp_size=2, cp_size=2)) == [4, 8, 12]
    assert group_of([3, 5, 9], 32, tp=2, cp=2).padded_fraction == pytest.approx(7 / 24)
    assert group_of([3, 5, 9], 32).padded_fraction == 0.0
    assert group_of([3, 5, 9], 32, tp=2).padded_fraction == pytest.approx(1 / 18)
    # A rank without a sequence runs a micro-batch of padding.
    assert group_of([4], 32, dp=2, tp=4).padded_fraction == pytest.approx(4 / 8)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), SIZES, SIZES, st.sampled_from([1, 2]))
@example([1], 4, 4, 2)
def test_padding_is_that_of_the_slots_on_all_ranks(
    lens: list[int], tp: int, cp: int, dp: int
) -> None:
    group = group_of(lens, 16, tp=tp, cp=cp, dp=dp)
    (plan,) = group._plan.updates
    rows = 0
    for shard, cuts in zip(group._plan.shards, plan, strict=True):
        for micro_batch in cuts:
            held = [lens[shard[i]] for i in micro_batch]
            for rank in range(tp * cp):
                grid = TokenGrid(tp, rank % tp, cp, rank // tp)
                rows += len(layout_tokens(held, grid).routers)
    assert group.padded_fraction == pytest.approx(1 - sum(lens) / rows)
