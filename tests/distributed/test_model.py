"""What one rank builds: names, options of the configuration, optimizer and checkpoint."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rltrain.config.optimizer import OptimizerConfig
from rltrain.config.policy import ParallelConfig, PolicyConfig, PrecisionConfig
from rltrain.verification.layout_models import MODELS
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.seeded import fill_seeded
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.tiny import ARCH, Layout, forward_backward

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
DENSE = replace(
    ARCH, family="qwen3", num_experts=0, experts_per_token=0, expert_size=0, moe_layers=()
)


def check(rank: int, folder: Path) -> None:
    """All checks below, in one process and one world."""
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh

    with pytest.raises(ValueError, match="needs tp\\*pp\\*cp\\*dp=2 ranks, found 1"):
        init_mesh(ParallelConfig(dp=2), 0, 1, rendezvous(folder, "wrong"), CPU)
    mesh = init_mesh(ParallelConfig(), 0, 1, rendezvous(folder, "one"), CPU)
    for checked in CHECKS:
        checked(mesh)
    destroy_mesh()


def test_one_rank(tmp_path: Path) -> None:
    run_ranks(check, 1, tmp_path)


def build(mesh: Any, arch: Architecture = ARCH, **options: Any) -> list[nn.Module]:
    from rltrain.policy.megatron.megatron_model import build_model

    keywords = {k: options.pop(k) for k in ("ddp", "freeze_router") if k in options}
    policy = PolicyConfig(**options)
    chunks = build_model(arch, policy, mesh, device=CPU, routing_replay=False, **keywords)
    fill_seeded(chunks, arch, mesh)
    return chunks


def gradients(mesh: Any, chunks: list[nn.Module]) -> dict[str, Tensor]:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    logits, _ = forward_backward(chunks, Layout(), mesh)
    found = {f"logits {i}": x for i, x in logits.items()}
    named = chunks[0].module.named_parameters()
    return found | {name: p.main_grad.clone() for name, p in named if p.requires_grad}


def check_names(mesh: Any) -> None:
    """Transformer Engine's, as megatron-core uses them."""
    attention = {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
    }
    dense = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    experts = {f"mlp.experts.linear_fc{n}.weight{i}" for n in (1, 2) for i in range(8)}
    moe = {"pre_mlp_layernorm.weight", "mlp.router.weight", *experts}
    expected = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
    for layer in range(3):
        for name in attention | (moe if layer in ARCH.moe_layers else dense):
            expected.add(f"decoder.layers.{layer}.{name}")
    [chunk] = build(mesh)
    assert dict(chunk.module.named_parameters()).keys() == expected | {"output_layer.weight"}
    [tied] = build(mesh, replace(ARCH, tie_embeddings=True))
    assert dict(tied.module.named_parameters()).keys() == expected


def check_no_setting_is_read_past(mesh: Any) -> None:
    """The builder reads every field of the architecture."""
    from rltrain.policy.megatron.megatron_model import build_model

    read: set[str] = set()

    class Recording(Architecture):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    names = {field.name for field in fields(Architecture)}
    unread = set(names)
    for arch in MODELS.values():
        recording = Recording(**{name: getattr(arch, name) for name in names})
        read.clear()  # its own checks
        build_model(recording, PolicyConfig(), mesh, device=CPU, routing_replay=False)
        unread -= read
    assert unread == {"family", "skipped_mtp_layers"}  # they say nothing of what is built


def check_routers(mesh: Any) -> None:
    from rltrain.policy.megatron.megatron_model import decoder_routers

    [chunk] = build(mesh)
    routers = decoder_routers(chunk)
    assert sorted(routers) == [0, 2]
    assert routers[2] is chunk.module.decoder.layers[2].mlp.router
    [dense] = build(mesh, DENSE)
    assert decoder_routers(dense) == {}
    assert all(x.isfinite().all() for x in gradients(mesh, [dense]).values())


def check_weights_are_nan_until_loaded(mesh: Any) -> None:
    from rltrain.policy.megatron.megatron_model import build_model

    chunks = build_model(ARCH, PolicyConfig(), mesh, device=CPU, routing_replay=False)
    weights = [p for p in chunks[0].parameters() if p.ndim == 2]
    assert all(p.isnan().all() for p in weights)


def check_recomputation_changes_nothing(mesh: Any) -> None:
    expected = gradients(mesh, build(mesh))
    for recompute in ("selective", "full"):
        found = gradients(mesh, build(mesh, recompute=recompute))
        assert all(torch.equal(found[name], x) for name, x in expected.items()), recompute


def check_dispatchers_agree(mesh: Any) -> None:
    expected = gradients(mesh, build(mesh))
    for name, found in gradients(mesh, build(mesh, dispatcher="allgather")).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6)


def check_the_fused_activation_agrees(mesh: Any) -> None:
    """GPUs have it by default: experts' weighted SwiGLU and a dense layer's."""
    expected = gradients(mesh, build(mesh))
    fused = build(mesh, megatron_args={"bias_activation_fusion": True})
    for name, found in gradients(mesh, fused).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6)


def check_output_head_in_fp32(mesh: Any) -> None:
    inputs = []
    for tied in (False, True):
        arch = replace(ARCH, tie_embeddings=tied)
        [chunk] = build(mesh, arch, precision=PrecisionConfig(params="bf16"))
        chunk.module.output_layer.register_forward_hook(lambda *found: inputs.append(found))
        assert all(x.isfinite().all() for x in gradients(mesh, [chunk]).values())
        _, (hidden,), (logits, _) = inputs[-1]
        head = chunk.module.embedding.word_embeddings if tied else chunk.module.output_layer
        assert head.weight.dtype == torch.bfloat16 and logits.dtype == torch.float32
        assert torch.equal(logits, nn.functional.linear(hidden.float(), head.weight.float()))
    [chunk] = build(mesh, precision=PrecisionConfig(params="bf16", head="params"))
    chunk.module.output_layer.register_forward_hook(lambda *found: inputs.append(found))
    gradients(mesh, [chunk])
    assert inputs[-1][2][0].dtype == torch.bfloat16


def check_reference_asks_for_no_gradient(mesh: Any) -> None:
    [model] = build(mesh, ddp=False)
    assert not any(p.requires_grad for p in model.parameters())


def _moved(mesh: Any, chunks: list[nn.Module], config: OptimizerConfig) -> dict[str, float]:
    """How far the first step moves every weight at most."""
    from rltrain.policy.optimizer import build_optimizer, take_step

    optimizer, rate = build_optimizer(chunks, config, PrecisionConfig(), CPU)
    before = {n: p.detach().clone() for n, p in chunks[0].module.named_parameters()}
    gradients(mesh, chunks)
    rate.step()
    assert take_step(optimizer, chunks) > 0
    after = chunks[0].module.named_parameters()
    return {n: float((p.detach() - before[n]).abs().max()) for n, p in after}


def check_router_rates(mesh: Any) -> None:
    # Adam's first step moves every weight by its learning rate.
    moved = _moved(mesh, build(mesh), OptimizerConfig(lr=1e-2, router_lr=1e-3))
    for name, distance in moved.items():
        assert distance == pytest.approx(1e-3 if "router" in name else 1e-2, rel=1e-2), name
    moved = _moved(mesh, build(mesh, freeze_router=True), OptimizerConfig(lr=1e-2))
    for name, distance in moved.items():
        assert distance == pytest.approx(0 if "router" in name else 1e-2, rel=1e-2), name


def check_norms_do_not_decay(mesh: Any) -> None:
    from rltrain.policy.optimizer import build_optimizer

    chunks = build(mesh)
    config = OptimizerConfig(weight_decay=0.1)
    optimizer, _ = build_optimizer(chunks, config, PrecisionConfig(), CPU)
    sizes = {0.0: 0, 0.1: 0}
    for group in optimizer.param_groups:
        sizes[group["weight_decay"]] += sum(p.numel() for p in group["params"])
    norms = sum(p.numel() for p in chunks[0].parameters() if p.ndim == 1)
    everything = sum(p.numel() for p in chunks[0].parameters())
    assert sizes == {0.0: norms, 0.1: everything - norms}


def check_no_step_on_a_nan_gradient(mesh: Any) -> None:
    from rltrain.policy.optimizer import build_optimizer, take_step

    chunks = build(mesh)
    optimizer, _ = build_optimizer(chunks, OptimizerConfig(), PrecisionConfig(), CPU)
    gradients(mesh, chunks)
    before = [p.detach().clone() for p in chunks[0].parameters()]
    chunks[0].module.output_layer.weight.main_grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="norm is nan"):
        take_step(optimizer, chunks)
    after = chunks[0].parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def check_every_token_belongs_to_a_sequence(mesh: Any) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    [model] = build(mesh, ddp=False)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, None, None, 3, 3)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises((ValueError, RuntimeError), match="3"):
        model(tokens, tokens, None, packed_seq_params=packed)


def check_torch_adam_survives_a_checkpoint(mesh: Any) -> None:
    """The two fixes that Megatron's checkpoint of torch's Adam needs."""
    from rltrain.policy.optimizer import build_optimizer, take_step

    chunks = build(mesh)
    optimizer, _ = build_optimizer(chunks, OptimizerConfig(), PrecisionConfig(), CPU)
    for _ in range(2):
        gradients(mesh, chunks)
        take_step(optimizer, chunks)
    for part in optimizer.chained_optimizers:
        part.load_state_dict(part.state_dict())
        steps = [state["step"] for state in part.optimizer.state.values()]
        assert {float(step) for step in steps} == {2}
        param = next(iter(part.model_param_group_index_map))
        stored = part._get_main_param_and_optimizer_states(param)
        del stored["step"]  # checkpoints keep it once, not per parameter
        with torch.no_grad():
            part._set_main_param_and_optimizer_states(param, stored)
    gradients(mesh, chunks)
    take_step(optimizer, chunks)
    for part in optimizer.chained_optimizers:
        counted = {float(state["step"]) for state in part.optimizer.state.values()}
        assert counted == {3}, "counted once per parameter"


def check_cpu_patches_are_applied_once(mesh: Any) -> None:
    from rltrain.patches.megatron_cpu import CPU_PATCHES, patch_megatron_for_cpu
    from rltrain.patches.registry import is_applied

    before = torch.zeros
    patch_megatron_for_cpu()
    assert torch.zeros is before
    assert all(is_applied(patch) for patch in CPU_PATCHES)
    assert torch.zeros(1, device="cuda").device == CPU


CHECKS: list[Callable[[Any], None]] = [
    value for name, value in list(globals().items()) if name.startswith("check_")
]
