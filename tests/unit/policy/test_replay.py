"""Taps on Megatron's own routers: what they force and refuse, and that they leave nothing."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.policy.passes.replay import RouterTap, RoutingTaps, Target, tapped
from rltrain.routing.deficits import upper_edges

E, K = 8, 2
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = SIGMOID | {"moe_router_enable_expert_bias": True}


def router(**fields: Any) -> TopKRouter:
    ours: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "num_moe_experts": E,
        "moe_router_topk": K,
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_enable_routing_replay": True,
    }
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    with pytest.MonkeyPatch.context() as patch:  # it makes an expert bias on the current GPU
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        return TopKRouter(TransformerConfig(**ours | fields), groups)


def draw(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, E, generator=torch.Generator().manual_seed(seed))


def targets(*experts: int, rows: int = 3) -> dict[int, Target]:
    chosen = torch.tensor([experts], dtype=torch.uint8).repeat(rows, 1)
    return {0: Target(chosen, torch.ones(rows, dtype=torch.bool))}


def route(built: TopKRouter, logits: Tensor) -> list[list[int]]:
    """The experts of every row, ascending."""
    _, routing_map = built.routing(logits.unsqueeze(1))
    return [row.nonzero().flatten().tolist() for row in routing_map]


def forward(
    taps: RoutingTaps,
    built: TopKRouter,
    micro_batch: int,
    logits: Tensor,
    chosen: Mapping[int, Target] | None = None,
) -> tuple[list[list[int]], Tensor]:
    """What was chosen, and an output whose backward pass is the micro-batch's."""
    with taps.forward(micro_batch, chosen):
        experts = route(built, logits)
    output = torch.zeros(1, requires_grad=True) * 1
    taps.mark_backward(micro_batch, output)
    return experts, output


def recompute(built: TopKRouter, output: Tensor, logits: Tensor) -> list[list[int]]:
    """As Megatron's checkpointing does: the router again, once the backward pass has begun."""
    output.sum().backward()
    return route(built, logits)


def native(logits: Tensor) -> list[list[int]]:
    return logits.topk(K).indices.sort().values.tolist()


# Recomputation


def test_recomputation_repeats_a_native_choice_though_scores_have_moved() -> None:
    """A near tie that rounds the other way would send other rows to other ranks."""
    built, logits = router(), draw(3)
    with tapped({0: built}, num_micro_batches=1, recomputations={0: 1}) as taps:
        chosen, output = forward(taps, built, 0, logits)
        moved = logits.flip(1)
        assert chosen == native(logits) != native(moved)
        assert recompute(built, output, moved) == chosen


def test_rows_that_chose_live_repeat_that_choice() -> None:
    built, logits = router(), draw(3)
    given_ = targets(0, 1)
    given_[0].replayed[1] = False
    with tapped({0: built}, num_micro_batches=1, recomputations={0: 1}) as taps:
        chosen, output = forward(taps, built, 0, logits, given_)
        assert chosen == [[0, 1], native(logits)[1], [0, 1]]
        assert recompute(built, output, logits.flip(1)) == chosen


@pytest.mark.parametrize("fields", [{}, {"moe_router_pre_softmax": True}, SIGMOID, BIAS])
def test_an_expert_that_the_router_has_left_is_not_replayed(fields: dict[str, Any]) -> None:
    """By its own gates, whatever scores Megatron hands to the tap; and recomputed as it was."""
    built, logits = router(**fields), draw(3)
    lowest = logits.argmin(1)
    experts = torch.stack([logits.argmax(1), lowest], 1).to(torch.uint8)
    given_ = {0: Target(experts, torch.tensor([True, True, False]))}
    ran = {}
    for ratio in (0.0, 1e-9, 1.0):
        with tapped(
            {0: built},
            num_micro_batches=1,
            recomputations={0: 1},
            record=True,
            min_gate_ratio=ratio,
        ) as taps:
            ran[ratio], output = forward(taps, built, 0, logits, given_)
            used = taps.recorded(0)[0].used.sort().values.tolist()
            assert used == ran[ratio] == recompute(built, output, logits.flip(1))
    assert ran[0.0] == ran[1e-9] == [*experts[:2].long().sort().values.tolist(), native(logits)[2]]
    assert ran[1.0] == native(logits)


@given(st.permutations(range(4)), st.lists(st.integers(1, 5), min_size=4, max_size=4))
@example([0, 1, 2, 3], [3, 3, 3, 3])  # 1F1B
@example([3, 2, 1, 0], [3, 3, 3, 3])  # last in, first out: Megatron's queue gives each another's
@example([1, 0, 3, 2], [2, 5, 2, 1])
def test_recomputation_is_right_in_any_order(order: list[int], rows: list[int]) -> None:
    built = router()
    with tapped({0: built}, num_micro_batches=4, recomputations={0: 1}) as taps:
        ran = [
            forward(taps, built, n, draw(rows[n]), targets(n, n + 1, rows=rows[n]))
            for n in range(4)
        ]
        for n in order:
            chosen, output = ran[n]
            assert chosen == [[n, n + 1]] * rows[n]
            assert recompute(built, output, draw(rows[n], seed=9)) == chosen


@pytest.mark.parametrize("rows", [3, 5])
def test_a_forward_only_pass_leaves_nothing_for_the_next_recomputation(rows: int) -> None:
    """With Megatron's queue an update of equally many rows was silently wrong, of others failed."""
    built = router()
    with tapped({0: built}, num_micro_batches=1) as taps:
        forward(taps, built, 0, draw(rows), targets(6, 7, rows=rows))
    with tapped({0: built}, num_micro_batches=1, recomputations={0: 1}) as taps:
        chosen, output = forward(taps, built, 0, draw(3), targets(0, 1))
        assert recompute(built, output, draw(3)) == chosen == [[0, 1]] * 3


def test_an_interrupted_pass_leaves_nothing() -> None:
    built = router()
    with (
        pytest.raises(ZeroDivisionError),
        tapped({0: built}, num_micro_batches=2, recomputations={0: 1}) as taps,
    ):
        forward(taps, built, 0, draw(3), targets(6, 7))
        raise ZeroDivisionError
    assert route(built, draw(3)) == native(draw(3))
    with tapped({0: built}, num_micro_batches=1, recomputations={0: 1}) as taps:
        chosen, output = forward(taps, built, 0, draw(3), targets(0, 1))
        assert recompute(built, output, draw(3)) == chosen


def test_other_rows_in_recomputation_are_refused() -> None:
    built = router()
    with (
        pytest.raises(RuntimeError, match="micro-batch 0: recomputation sees 4 rows"),
        tapped({0: built}, num_micro_batches=1, recomputations={0: 1}) as taps,
    ):
        _, output = forward(taps, built, 0, draw(3))
        recompute(built, output, draw(4))


# What is given


@pytest.mark.parametrize(
    "chosen",
    [targets(0, 1, rows=2), targets(0, 1, rows=4), targets(0, 1, 2), targets(0)],
    ids=["short rows", "long rows", "a column more", "a column less"],
)
def test_targets_of_another_shape_are_refused(chosen: dict[int, Target]) -> None:
    built = router()
    with (
        pytest.raises(RuntimeError, match=r"layer 0, micro-batch 0: the router sees .*\(3, 2\)"),
        tapped({0: built}, num_micro_batches=1) as taps,
    ):
        forward(taps, built, 0, draw(3), chosen)


def test_every_layer_needs_its_target() -> None:
    both = {0: router(), 2: router()}
    with (
        pytest.raises(RuntimeError, match=r"layers \[0\], but the model routes in \[0, 2\]"),
        tapped(both, num_micro_batches=1) as taps,
    ):
        forward(taps, both[0], 0, draw(3), targets(0, 1))


def test_layers_get_their_own_targets_in_whatever_order_they_were_found() -> None:
    both = {5: router(), 2: router()}
    chosen = {2: targets(0, 1)[0], 5: targets(6, 7)[0]}
    with tapped(both, num_micro_batches=1) as taps, taps.forward(0, chosen):
        assert route(both[2], draw(3)) == [[0, 1]] * 3
        assert route(both[5], draw(3)) == [[6, 7]] * 3


# That it happened


def test_a_router_that_did_not_run_is_named() -> None:
    both = {0: router(), 2: router()}
    with (
        pytest.raises(RuntimeError, match=r"layer 2: expected 1 forward passes .* found 0 and 0"),
        tapped(both, num_micro_batches=1) as taps,
        taps.forward(0, None),
    ):
        route(both[0], draw(3))


def test_a_recomputation_that_did_not_come_or_was_not_expected_is_an_error() -> None:
    built = router()
    with (
        pytest.raises(RuntimeError, match=r"expected 1 .* and 1 recomputations .* found 1 and 0"),
        tapped({0: built}, num_micro_batches=1, recomputations={0: 1}) as taps,
    ):
        forward(taps, built, 0, draw(3))
    with (
        pytest.raises(RuntimeError, match="micro-batch 0 owes it no recomputation"),
        tapped({0: built}, num_micro_batches=1) as taps,
    ):
        _, output = forward(taps, built, 0, draw(3))
        recompute(built, output, draw(3))


@pytest.mark.parametrize("recomputations", [0, 1])
def test_a_router_that_runs_twice_is_an_error(recomputations: int) -> None:
    built = router()
    with (
        pytest.raises(RuntimeError, match="micro-batch 0 ran forward twice"),
        tapped({0: built}, num_micro_batches=2, recomputations={0: recomputations}) as taps,
    ):
        forward(taps, built, 0, draw(3))
        forward(taps, built, 0, draw(3))


def test_native_top_k_runs_only_where_a_row_or_a_record_needs_it() -> None:
    calls = []

    def native_topk(scores: Tensor, topk: int, *_: Any) -> tuple[Tensor, Tensor]:
        calls.append(scores)
        values, experts = scores.topk(topk)
        return values, experts

    chosen = torch.tensor([[0, 1]] * 5, dtype=torch.uint8)
    rows = torch.tensor([True, False, True, True, True])
    for replayed, recording, expected in (
        (None, False, 0),
        (None, True, 1),
        (rows, False, 1),
        (rows, True, 1),
    ):
        tap = RouterTap(0, recomputations=0, scores_are_logits=True)
        tap.target, tap.running, tap.recording = Target(chosen, replayed), 0, recording
        calls.clear()
        _, experts = tap(draw(5), K, None, None, native_topk)
        assert len(calls) == expected, (replayed, recording)
        own = experts.sort().values.tolist()
        assert own[0] == [0, 1]
        assert own[1] == ([0, 1] if replayed is None else native(draw(5))[1])


def test_no_tap_waits_for_the_device() -> None:
    """Meta tensors have no values: reading one, as ``.item()`` does, is an error."""
    tap = RouterTap(0, recomputations=1, scores_are_logits=True)
    scores = torch.empty(5, E, device="meta")
    chosen = torch.empty(5, K, dtype=torch.uint8, device="meta")
    tap.target = Target(chosen, torch.empty(5, dtype=torch.bool, device="meta"))
    tap.running, tap.recording, tap.comparing = 0, True, True
    _, experts = tap(scores, K, None, None, lambda scores, topk, *_: scores.topk(topk))
    tap.running, tap.recomputing = None, 0
    _, again = tap(scores, K)
    assert again is experts and tap.recorded[0].gate_mass.is_meta
    compared = tap.recorded[0].deficits
    assert compared is not None and all(values.is_meta for values in compared)
    with pytest.raises(RuntimeError, match="meta"):
        experts.sum().item()


# That it is alone


def test_megatrons_own_state_is_neither_read_nor_written() -> None:
    built, other = router(), router()
    with tapped({0: built}, num_micro_batches=1, recomputations={0: 1}) as taps:
        RouterReplay.global_router_replay_instances[-1].set_target_indices(torch.zeros(3, 2))
        _, output = forward(taps, built, 0, draw(3), targets(6, 7))
        assert route(other, draw(3)) == native(draw(3)), "another model in the process"
        recompute(built, output, draw(3))
    replay = built.router_replay
    assert replay.target_topk_idx is None and replay.replay_backward_list == []
    assert route(built, draw(3)) == native(draw(3))


def test_taps_do_not_lie_on_taps() -> None:
    built = router()
    with (
        tapped({0: built}, num_micro_batches=0),
        pytest.raises(AssertionError, match="layer 0: its router is already tapped"),
        tapped({0: built}, num_micro_batches=0),
    ):
        pass
    with tapped({0: built}, num_micro_batches=0):
        pass


def test_another_signature_upstream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = router()
    monkeypatch.setattr(RouterReplay, "get_replay_topk", lambda self, scores, topk: None)
    with (
        pytest.raises(RuntimeError, match=r"get_replay_topk takes .* install a megatron-core"),
        tapped({0: built}, num_micro_batches=0),
    ):
        pass


# Gates


@pytest.mark.parametrize("fields", [{}, {"moe_router_pre_softmax": True}, SIGMOID, BIAS])
def test_replayed_experts_have_their_gates_and_a_gradient(fields: dict[str, Any]) -> None:
    """Of the full scores: an expert that native routing left out is no zero without a gradient."""
    built, logits = router(**fields), torch.arange(8.0).repeat(3, 1).requires_grad_()
    with tapped({0: built}, num_micro_batches=1) as taps, taps.forward(0, targets(0, 1)):
        gates, _ = built.routing(logits.unsqueeze(1))
    gates[:, 0].sum().backward()
    assert (gates.detach()[:, :2] > 0).all() and (gates[:, 2:] == 0).all()
    assert logits.grad is not None and (logits.grad[:, :2] != 0).all()


@pytest.mark.parametrize(
    "fields",
    [{}, {"moe_router_pre_softmax": True}, SIGMOID, BIAS],
    ids=["logits", "softmax", "sigmoid", "bias"],
)
def test_deficits_are_in_logits_whatever_a_router_compares(fields: dict[str, Any]) -> None:
    """The given experts lie below the weakest chosen one; a bias of 0 changes nothing."""
    logits = draw(50)
    built = router(**fields)
    chosen = torch.tensor([0, 1])
    target = {0: Target(chosen.to(torch.uint8).repeat(50, 1), torch.ones(50, dtype=torch.bool))}
    with (
        tapped({0: built}, num_micro_batches=1, record=True, compare=True) as taps,
        taps.forward(0, target),
    ):
        route(built, logits)
        recorded = taps.recorded(0)[0]
    assert recorded.deficits is not None
    weakest = logits.topk(K).values[:, -1:]
    expected = (weakest - logits[:, chosen]).clamp_min(0)
    found = upper_edges()[recorded.deficits.bins.long()]
    assert ((found == 0) == (expected == 0)).all()
    # A gate's slope changes between the two scores: within an octave and a half, mostly less.
    ratio = (found / expected)[expected > 0].log2()
    assert ratio.abs().max() < (2.0 if "moe_router_score_function" in fields else 0.26)
    torch.testing.assert_close(recorded.deficits.spread, logits.std(1, unbiased=False))


def test_gate_mass_is_of_gates_without_the_expert_bias() -> None:
    logits, bias = draw(5), torch.linspace(-3, 3, E)
    for fields in ({}, {"moe_router_pre_softmax": True}, SIGMOID, BIAS):
        built = router(**fields)
        gates = logits.sigmoid() if fields in (SIGMOID, BIAS) else logits.softmax(1)
        chosen = gates.topk(K).indices
        if fields is BIAS:
            built.expert_bias.copy_(bias)
            chosen = (gates + bias).topk(K).indices
        with tapped({0: built}, num_micro_batches=1, record=True) as taps:
            forward(taps, built, 0, logits, targets(0, 1, rows=5))
            recorded = taps.recorded(0)[0]
        assert torch.equal(recorded.native.sort().values, chosen.sort().values)
        assert recorded.used.tolist() == [[0, 1]] * 5
        expected = gates[:, :2].sum(1) / gates.gather(1, chosen).sum(1)
        torch.testing.assert_close(recorded.gate_mass, expected)
