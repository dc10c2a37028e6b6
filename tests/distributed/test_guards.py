"""The guards run when models are built, and their claims about Megatron's router are true."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.config.policy import ParallelConfig, PolicyConfig
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny import ARCH

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
DENSE = replace(
    ARCH, family="qwen3", num_experts=0, experts_per_token=0, expert_size=0, moe_layers=()
)


def test_one_rank(tmp_path: Path) -> None:
    run_ranks(check, 1, tmp_path)


def check(rank: int, folder: Path) -> None:
    """All checks below, in one process and one world."""
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh

    mesh = init_mesh(ParallelConfig(), 0, 1, rendezvous(folder, "one"), CPU)
    for checked in CHECKS:
        checked(mesh)
    destroy_mesh()


def build(mesh: Any, arch: Any = ARCH, routing_replay: bool = True, **megatron_args: Any) -> Any:
    from rltrain.policy.megatron.megatron_model import build_model

    policy = PolicyConfig(megatron_args=megatron_args)
    [chunk] = build_model(arch, policy, mesh, device=CPU, routing_replay=routing_replay, ddp=False)
    return chunk


def check_megatron_args_reach_the_router(mesh: Any) -> None:
    chunk = build(mesh, moe_z_loss_coeff=0.25)
    assert chunk.decoder.layers[2].mlp.router.config.moe_z_loss_coeff == 0.25


def check_our_fields_are_refused(mesh: Any) -> None:
    """Those of the real configuration, in every branch of it."""
    for field, key in {
        "hidden_size": "leave it out",
        "calculate_per_token_loss": "leave it out",
        "moe_router_topk": "leave it out",
        "recompute_granularity": "policy.recompute",
        "moe_token_dispatcher_type": "policy.dispatcher",
        "virtual_pipeline_model_parallel_size": "policy.parallel.vpp",
        "batch_p2p_comm": "leave it out",
    }.items():
        with pytest.raises(ValueError, match=rf"{field}: rltrain sets .*{key}"):
            build(mesh, **{field: 1})
    with pytest.raises(ValueError, match="num_moe_experts: rltrain sets"):
        build(mesh, DENSE, num_moe_experts=8)


def check_what_cannot_replay_is_not_built(mesh: Any) -> None:
    with pytest.raises(ValueError, match="moe_router_fusion=True cannot be replayed"):
        build(mesh, moe_router_fusion=True)
    build(mesh, routing_replay=False, moe_router_fusion=True)
    build(mesh, DENSE, moe_router_fusion=True)


def check_crossed_messages_are_refused(mesh: Any) -> None:
    """Several chunks per stage. Only the guard runs here, since one stage has one chunk."""
    import rltrain.policy.megatron.megatron_model as model

    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "check_schedule", called.append)
        build(mesh, DENSE, routing_replay=False)
    assert len(called) == 1


def check_bare_routers_are_not_built(mesh: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.transformer.moe.router.RouterReplay", lambda: None)
        with pytest.raises(RuntimeError, match=r"layers \[0, 2\]: .*without RouterReplay"):
            build(mesh)
        build(mesh, routing_replay=False)


def gates(chunk: Any, hidden: Tensor) -> Tensor:
    """What layer 2's router makes of the replayed experts 0 and 1."""
    from rltrain.policy.passes.replay import Target, tapped

    router = chunk.decoder.layers[2].mlp.router
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)) / 4)
        experts = torch.tensor([[0, 1]]).repeat(len(hidden), 1)
        target = Target(experts.to(torch.uint8), torch.ones(len(hidden), dtype=torch.bool))
        with tapped({2: router}, num_micro_batches=1) as taps, taps.forward(0, {2: target}):
            probs, _ = router(hidden)
    return probs


def check_random_gates_are_random(mesh: Any) -> None:
    """Two passes over the same tokens and routes differ where a guard says so, and nowhere else."""
    hidden = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(0))
    chunk = build(mesh)
    assert torch.equal(gates(chunk, hidden), gates(chunk, hidden))
    for asked in ({"moe_input_jitter_eps": 0.1}, {"moe_router_force_load_balancing": True}):
        chunk = build(mesh, routing_replay=False, **asked)
        from megatron.core.transformer.moe.router_replay import RouterReplay

        chunk.decoder.layers[2].mlp.router.router_replay = RouterReplay()
        assert not torch.equal(gates(chunk, hidden), gates(chunk, hidden)), asked


def check_a_padding_mask_would_spoil_the_expert_bias(mesh: Any) -> None:
    """So no mask is passed, and a bias that follows the load is rejected."""
    from megatron.core.transformer.moe.router import TopKRouter

    config = build(mesh, replace(ARCH, score_function="sigmoid", expert_bias=True)).config
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)

    def counted(num_tokens: int) -> list[float]:
        router = TopKRouter(config, groups)
        routing_map = torch.zeros(num_tokens, 8, dtype=torch.bool)
        routing_map[:, :2] = True
        padding = torch.arange(num_tokens) >= num_tokens - 2  # the last two rows
        router._apply_expert_bias(routing_map, padding_mask=padding)
        found: list[float] = router.local_tokens_per_expert.tolist()
        return found

    with pytest.raises(RuntimeError, match="size of tensor"):
        counted(num_tokens=6)
    assert counted(num_tokens=8)[:2] == [8, 8]  # 6 are no padding


CHECKS: list[Callable[[Any], None]] = [
    value for name, value in list(globals().items()) if name.startswith("check_")
]
