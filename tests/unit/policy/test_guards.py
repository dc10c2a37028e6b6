"""Options that cannot replay are rejected, and the routers in question really cannot."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from rltrain.policy.megatron.guards import (
    GUARDS,
    check_armed,
    check_replay_options,
    check_schedule,
    native_losses,
)
from rltrain.policy.passes.replay import Target, tapped

VERSION = "0.16.1"
BALANCING = "moe_router_load_balancing_type"
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def config(**fields: Any) -> TransformerConfig:
    ours: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "add_bias_linear": False,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 16,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_enable_routing_replay": True,
    }
    return TransformerConfig(**ours | fields)


OVERLAP = {"expert_model_parallel_size": 2, "bf16": True}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("moe_router_fusion", {"moe_router_fusion": True}, "fused router"),
    (BALANCING, {BALANCING: "sinkhorn"}, "sinkhorn"),
    (BALANCING, {BALANCING: "quantile_balancing"}, "quantile"),
    (
        BALANCING,
        {BALANCING: ["aux_loss", "sinkhorn"], "moe_aux_loss_coeff": [0.1, 0.0]},
        "sinkhorn",
    ),
    ("moe_expert_capacity_factor", {"moe_expert_capacity_factor": 2.0}, "dropped"),
    (
        "moe_expert_capacity_factor",
        {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
        "moe_pad_expert_input_to_capacity",
    ),
    (
        "moe_router_force_load_balancing",
        {"moe_router_force_load_balancing": True},
        "random numbers",
    ),
    ("moe_input_jitter_eps", {"moe_input_jitter_eps": 0.01}, "noise"),
    ("cuda_graph_impl", {"cuda_graph_impl": "local"}, "captured"),
    ("cuda_graph_impl", {"enable_cuda_graph": True}, "enable_cuda_graph"),
    ("cuda_graph_impl", {"external_cuda_graph": True}, "external_cuda_graph"),
    (
        "cuda_graph_impl",
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        "captured",
    ),
    (
        "cuda_graph_impl",
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"},
        "cuda_graph_scope=attn",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        OVERLAP | {"overlap_moe_expert_parallel_comm": True},
        "combined 1F1B",
    ),
    ("hybrid_context_parallel", {"hybrid_context_parallel": True}, "would not match"),
    ("moe_router_bias_update_rate", BIAS | {"moe_router_bias_update_rate": 1e-3}, "padding rows"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("field", "fields", "why"), REFUSED)
def test_what_cannot_replay_is_refused(field: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError) as refused:
        check_replay_options(config(**fields), VERSION)
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"policy.megatron_args.{field}=") and why in line and "Remedy:" in line


def test_a_field_of_a_later_megatron_is_refused_there() -> None:
    later = config()
    check_replay_options(later, VERSION)
    later.moe_router_force_biased = None  # type: ignore[attr-defined]
    check_replay_options(later, VERSION)
    later.moe_router_force_biased = 0.5  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"moe_router_force_biased=0\.5"):
        check_replay_options(later, VERSION)


def test_every_guard_is_tested() -> None:
    only_later = {"moe_router_force_biased"}
    assert {guard.field for guard in GUARDS} == {field for field, *_ in REFUSED} | only_later
    known = vars(config())
    assert {guard.field for guard in GUARDS} - known.keys() == only_later


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"},
        {"cuda_graph_scope": "full_iteration"},  # a scope, and nothing that captures
        BIAS,  # frozen
        {"moe_router_bias_update_rate": 1e-3},  # of no bias
        {"moe_expert_capacity_factor": -1.0},  # Megatron's other word for none
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ],
)
def test_what_can_replay_passes_in_silence(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    check_replay_options(config(**fields), VERSION)
    assert caplog.messages == []


def test_all_that_breaks_replay_is_named_at_once() -> None:
    both = config(moe_router_fusion=True, moe_input_jitter_eps=0.1)
    with pytest.raises(ValueError) as refused:
        check_replay_options(both, VERSION)
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("version", ["0.15.3", "0.16.0", "0.17.0rc0", "0.17.1", "0.19.2"])
def test_other_megatrons_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match=rf"megatron-core>=0.16.1,<0.17, found {version}: pip"):
        check_replay_options(config(), version)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({BALANCING: "aux_loss", "moe_aux_loss_coeff": 0.01}, ["aux_loss=0.01"]),
        (
            {BALANCING: ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.0]},
            ["seq_aux_loss=0.1"],
        ),
        ({"moe_z_loss_coeff": 1e-3}, ["moe_z_loss=0.001"]),
        ({BALANCING: "aux_loss"}, []),
        ({"moe_z_loss_coeff": 0.0}, []),
    ],
)
def test_losses_from_native_routing_are_allowed_and_said(
    fields: dict[str, Any], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    built = config(**fields)
    with caplog.at_level(logging.WARNING):
        check_replay_options(built, VERSION)
    assert native_losses(built) == expected
    assert [message.split(" is on")[0] for message in caplog.messages] == expected
    assert all("not replayed" in m and "not invariant" in m for m in caplog.messages)


def test_interleaved_stages_with_batched_sends_are_refused() -> None:
    stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    chunks = stages | {"virtual_pipeline_model_parallel_size": 2}
    check_schedule(config())
    check_schedule(config(**stages))
    check_schedule(config(**chunks, overlap_p2p_comm=True, batch_p2p_comm=False))
    with pytest.raises(ValueError, match=r"batch_p2p_comm=True with 2 .*overlap_p2p_comm=True"):
        check_schedule(config(**chunks))


# What the guards say, on Megatron's own router.


def router(**fields: Any) -> TopKRouter:
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    return TopKRouter(config(**fields), groups)


def replay(built: TopKRouter, experts: torch.Tensor) -> torch.Tensor:
    """Route one micro-batch of equal tokens by ``experts``.  # [S, K] -> map [S, E]"""
    logits = torch.arange(8.0).expand(len(experts), 1, 8)  # all prefer experts 6 and 7
    target = Target(experts.to(torch.uint8), torch.ones(len(experts), dtype=torch.bool))
    with tapped({0: built}, num_micro_batches=1) as taps, taps.forward(0, {0: target}):
        _, routing_map = built.routing(logits)
    return routing_map


BALANCED = {BALANCING: ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.0]}
EXPERTS = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]])


def test_a_router_that_passes_replays() -> None:
    expected = torch.zeros(4, 8, dtype=torch.bool).scatter(1, EXPERTS, True)
    assert torch.equal(replay(router(), EXPERTS), expected)
    assert torch.equal(replay(router(**BALANCED), EXPERTS), expected)


def test_sinkhorn_never_asks() -> None:
    with pytest.raises(RuntimeError, match=r"expected 1 forward passes .* found 0"):
        replay(router(**{BALANCING: "sinkhorn"}), EXPERTS)


def test_capacity_drops_replayed_experts() -> None:
    assert replay(router(), EXPERTS).sum() == 8
    assert replay(router(moe_expert_capacity_factor=1.0), EXPERTS).sum() < 8


def test_routers_are_armed_where_the_architecture_has_them() -> None:
    armed, bare = router(), router(moe_enable_routing_replay=False)
    check_armed({0: armed, 2: armed}, [2, 0])
    check_armed({}, [])
    with pytest.raises(RuntimeError, match=r"expected routers in layers \[0, 1\] .* in \[0, 2\]"):
        check_armed({0: armed, 2: armed}, [0, 1])
    with pytest.raises(RuntimeError, match=r"expected routers in layers \[0, 2\] .* in \[0\]"):
        check_armed({0: armed}, [0, 2])
    with pytest.raises(RuntimeError, match=r"layers \[2\]: .*without RouterReplay"):
        check_armed({0: armed, 2: bare}, [0, 2])
