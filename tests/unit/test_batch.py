"""The batch refuses what does not fit, and says which stage is missing."""

from typing import Any

import pytest
import torch

from rltrain.batch import Batch, RouteRef


def two_sequences() -> Batch:
    return Batch(
        tokens=torch.tensor([11, 12, 21, 22, 13, 23, 24]),
        seq_lens=torch.tensor([4, 3]),
        response_mask=torch.tensor([False, False, True, True, False, True, True]),
    )


def test_required_fields_come_in_the_order_asked_for() -> None:
    rewards, advantages = torch.tensor([0.0, 1.0]), torch.arange(7.0)
    batch = two_sequences().with_fields(rewards=rewards, advantages=advantages)
    found = batch.require("advantages", "rewards")
    assert len(found) == 2 and found[0] is advantages and found[1] is rewards


def test_every_missing_field_is_named() -> None:
    batch = two_sequences().with_fields(rewards=torch.zeros(2))
    with pytest.raises(ValueError, match="the batch has no old_logprobs, advantages: run"):
        batch.require("rewards", "old_logprobs", "advantages")


def test_select_takes_whole_sequences_in_the_order_given() -> None:
    batch = two_sequences().with_fields(rewards=torch.tensor([0.0, 1.0]))
    swapped = batch.select([1, 0])
    assert swapped.tokens.tolist() == [13, 23, 24, 11, 12, 21, 22]
    assert swapped.seq_lens.tolist() == [3, 4]
    assert swapped.require("rewards")[0].tolist() == [1.0, 0.0]


def test_routes_go_with_their_sequences() -> None:
    refs = route_ref(rows=3), route_ref(rows=2)
    routes = torch.arange(14, dtype=torch.uint8).view(7, 1, 2)
    for held in refs, routes:
        batch = two_sequences().with_fields(rollout_expert_indices=held)
        swapped = batch.select([1, 0])
        alone = batch.select([1])
        if isinstance(held, tuple):
            assert swapped.rollout_expert_indices == (refs[1], refs[0])
            assert alone.rollout_expert_indices == (refs[1],)
            joined = type(batch).join([alone, batch]).rollout_expert_indices
            assert joined == (refs[1], refs[0], refs[1])
        else:
            found, one = swapped.rollout_expert_indices, alone.rollout_expert_indices
            assert isinstance(found, torch.Tensor) and isinstance(one, torch.Tensor)
            assert torch.equal(found, torch.cat([routes[4:], routes[:4]]))
            assert torch.equal(one, routes[4:])


def test_fields_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards: B=3, but the batch has B=2"):
        two_sequences().with_fields(rewards=torch.zeros(3))
    with pytest.raises(ValueError, match="seq_lens sum to 6, but tokens hold 7"):
        two_sequences().with_fields(seq_lens=torch.tensor([3, 3]))


def test_select_takes_routes_and_groups_with_their_sequences() -> None:
    refs = route_ref(rows=3), route_ref(rows=2)
    batch = two_sequences().with_fields(
        rollout_expert_indices=refs, group_ids=torch.tensor([4, 7]), rewards=torch.zeros(2)
    )
    swapped = batch.select([1, 0, 1])
    assert swapped.rollout_expert_indices == (refs[1], refs[0], refs[1])
    assert swapped.require("group_ids")[0].tolist() == [7, 4, 7]
    assert swapped.token_index([2, 0]).tolist() == [7, 8, 9, 0, 1, 2]


def test_joined_batches_keep_their_groups_apart() -> None:
    refs = route_ref(rows=3), route_ref(rows=2)
    one = two_sequences().with_fields(group_ids=torch.tensor([0, 1]), rollout_expert_indices=refs)
    empty, other = one.select([]), one.select([1, 1])
    joined = Batch.join([one, empty, other.with_fields(group_ids=torch.tensor([0, 0])), one])
    assert joined.require("group_ids")[0].tolist() == [0, 1, 2, 2, 3, 4]
    assert joined.seq_lens.tolist() == [4, 3, 3, 3, 4, 3]
    assert joined.tokens.tolist()[4:13] == [13, 23, 24] * 3
    assert joined.rollout_expert_indices == (*refs, refs[1], refs[1], *refs)


def route_ref(**fields: Any) -> RouteRef:
    defaults: dict[str, Any] = {
        "start_row": 0,
        "rows": 6,
        "layers": (1, 2, 5),
        "experts_per_token": 2,
        "num_experts": 8,
        "dtype": "uint8",
        "block_sizes": (1, 2),
        "checksums": (0, 0),
        "token_checksum": 0,
        "blocks": ("a", "b"),
        "weight_version": 0,
        "producer": "vLLM 0.30.0",
    }
    return RouteRef(**defaults | fields)


@pytest.mark.parametrize(
    "fields", [{"block_sizes": (1, 1)}, {"blocks": ("a",)}, {"checksums": (0, 0, 0)}]
)
def test_blocks_that_do_not_hold_the_layers_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="blocks and checksums for 3 layers"):
        route_ref(**fields)


@pytest.mark.parametrize(
    "missing",
    [((-1, 1),), ((0, 7),), ((2, 2),), ((3, 4), (1, 2)), ((1, 3), (2, 4)), ((1, 2), (2, 3))],
)
def test_missing_rows_lie_apart_and_within(missing: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="missing rows in order, apart, and from 0 to 6"):
        route_ref(missing=missing)
    route_ref(missing=((0, 1), (3, 6)))
    route_ref(first_row=4, missing=((9, 10),))


@pytest.mark.parametrize(("at", "where"), [(0, "0, token 0"), (3, "0, token 3"), (4, "1, token 0")])
@pytest.mark.parametrize("token", [-1, 25, 2**40])
def test_a_token_without_a_row_of_the_embedding(at: int, where: str, token: int) -> None:
    batch = two_sequences()
    batch.check_tokens(25)
    batch.tokens[at] = token
    with pytest.raises(ValueError, match=rf"sequence {where}: .* 0 to 24, .* found {token}: "):
        batch.check_tokens(25)


def test_a_shard_without_sequences_has_no_bad_token() -> None:
    two_sequences().select([]).check_tokens(1)
