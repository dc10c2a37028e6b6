"""A micro-batch takes its routes from the shard, the same as if it had a copy of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.batch import Batch
from rltrain.parallel.token_layout import PAD, TokenGrid
from rltrain.policy.passes.micro_batch import cut
from rltrain.routing.align import last_rows

LENGTHS = (5, 3, 7, 2)
LAYERS, EXPERTS, K = (2, 3, 6), 8, 2
GRIDS = [TokenGrid(), TokenGrid(tp_size=2, tp_rank=1), TokenGrid(cp_size=2, cp_rank=1, align=4)]


def shard() -> Batch:
    g = torch.Generator().manual_seed(0)
    lens = torch.tensor(LENGTHS)
    n = int(lens.sum())
    routes = torch.rand(n, len(LAYERS), EXPERTS, generator=g).topk(K).indices.to(torch.uint8)
    return Batch(
        tokens=torch.arange(n),
        seq_lens=lens,
        response_mask=torch.ones(n, dtype=torch.bool),
        rollout_expert_indices=routes,
        replay_expert_indices=routes,
        replay_mask=~last_rows(lens) & (torch.rand(n, generator=g) < 0.7),
    )


def reference(batch: Batch, index: Tensor) -> tuple[list[Any], list[bool]]:
    """By slot: the experts of the token that it reads, by layer, None for padding; and whether its
    routers must use them."""
    routes, mask = batch.require("replay_expert_indices", "replay_mask")
    tokens = index.tolist()
    experts = [None if token == PAD else routes[token].tolist() for token in tokens]
    return experts, [token == PAD or bool(mask[token]) for token in tokens]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("wanted", [LAYERS, (6, 2), (3,), ()])
def test_targets_are_those_of_the_micro_batchs_own_sequences(
    grid: TokenGrid, wanted: tuple[int, ...]
) -> None:
    plan = [[2, 0], [3], [1], []]
    for rows, mb in zip(plan, cut(shard(), plan, grid, torch.device("cpu")), strict=True):
        experts, replayed = reference(shard().select(rows), mb.layout.routers)
        targets = mb.route_targets(LAYERS, wanted, EXPERTS, record=True)
        assert list(targets) == list(wanted)
        for layer, target in targets.items():
            assert target.replayed is not None and target.replayed.tolist() == replayed
            for expected, row in zip(experts, target.experts.tolist(), strict=True):
                assert len(set(row)) == K
                assert expected is None or row == expected[LAYERS.index(layer)]


@pytest.mark.parametrize("grid", GRIDS)
def test_no_router_chooses_where_only_last_tokens_owe_no_route(grid: TokenGrid) -> None:
    """They get distinct experts, which nothing reads; every other row those of its route."""
    missing = shard()
    (routes,) = missing.require("replay_expert_indices")
    last = last_rows(missing.seq_lens)
    whole = missing.with_fields(
        replay_mask=~last, replay_expert_indices=torch.where(last.view(-1, 1, 1), 0, routes)
    )
    [mb] = cut(whole, [[0, 1, 2, 3]], grid, torch.device("cpu"))
    experts, replayed = reference(whole, mb.layout.routers)
    for layer, target in mb.route_targets(LAYERS, LAYERS, EXPERTS, record=False).items():
        assert target.replayed is None
        for expected, known, row in zip(experts, replayed, target.experts.tolist(), strict=True):
            assert expected is None or not known or row == expected[LAYERS.index(layer)]
        assert all(len(set(row)) == K for row in target.experts.tolist())
    # One row that has to choose live, and all is as it was.
    [mb] = cut(missing, [[0, 1, 2, 3]], grid, torch.device("cpu"))
    found = mb.route_targets(LAYERS, LAYERS, EXPERTS, record=False)
    recorded = mb.route_targets(LAYERS, LAYERS, EXPERTS, record=True)
    for layer, target in found.items():
        assert torch.equal(target.experts, recorded[layer].experts)
        assert target.replayed is not None
        assert torch.equal(target.replayed, recorded[layer].replayed)


def test_cutting_copies_no_routes() -> None:
    whole = shard()
    for mb in cut(whole, [[0], [1, 2], [3]], TokenGrid(), torch.device("cpu")):
        assert mb.batch.rollout_expert_indices is None and mb.batch.replay_expert_indices is None
        assert mb.shard.replay_expert_indices is whole.replay_expert_indices


@pytest.mark.parametrize("grid", GRIDS)
def test_slots_read_and_predict_their_own_tokens(grid: TokenGrid) -> None:
    """Ids are places in the shard; fields come at the slot that predicts their token."""
    [mb] = cut(shard(), [[2, 0]], grid, torch.device("cpu"))
    start = {0: 0, 2: LENGTHS[0] + LENGTHS[1]}
    ends = {start[i] + LENGTHS[i] - 1 for i in (0, 2)}
    for slot, (read, predicted) in enumerate(
        zip(mb.layout.tokens.tolist(), mb.layout.targets.tolist(), strict=True)
    ):
        if read != PAD:
            token = int(mb.input_ids[0, slot])
            assert token == int(mb.token_index[read])
            assert (predicted == PAD) == (token in ends)
            if predicted != PAD:
                assert int(mb.target_ids[slot]) == token + 1
    fields = 100 + mb.batch.tokens
    predicting = mb.layout.targets != PAD
    assert torch.equal(mb.at_targets(fields)[predicting], 100 + mb.target_ids[predicting])
    assert not mb.at_targets(fields)[~predicting].any()


def test_what_slots_yield_is_put_where_the_shard_has_their_tokens() -> None:
    """Of two context-parallel ranks together every token of the micro-batch, and no other."""
    found = torch.full((sum(LENGTHS),), -1)
    for rank in range(2):
        grid = TokenGrid(cp_size=2, cp_rank=rank)
        _, mb = cut(shard(), [[3], [2, 0]], grid, torch.device("cpu"))
        mb.scatter(mb.input_ids[0], mb.layout.tokens, found)
    first, third = torch.arange(5), torch.arange(8, 15)
    expected = torch.full_like(found, -1)
    expected[first], expected[third] = first, third
    assert torch.equal(found, expected)
