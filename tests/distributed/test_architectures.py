"""DeepSeek-V3's routing, latent attention and MTP layers, and gpt-oss: on one rank and on two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rltrain.config.optimizer import OptimizerConfig
from rltrain.config.policy import ParallelConfig, PolicyConfig
from rltrain.verification.layout_models import DEEPSEEK_LIKE, LATENT, MODELS
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.seeded import fill_seeded, seeded_tensor
from tests.distributed.run_ranks import rendezvous, run_ranks
from tests.distributed.stage_union import check_stages
from tests.distributed.tiny import Layout, forward_backward

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
CPU = torch.device("cpu")
REFERENCE = "one rank"
WITH_MTP = MODELS["deepseek mtp"]
PARTS = {"recompute": "selective"}  # and the modules that the model has
# name -> layout, options of the policy; `rltrain verify` has many more
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    REFERENCE: (Layout(sequences_per_micro_batch=1), {}),
    "recompute": (Layout(), PARTS),
    "dp2 ep2": (Layout(ParallelConfig(dp=2, ep=2)), {}),
    "tp2 ep2": (Layout(ParallelConfig(tp=2, ep=2)), {"recompute": "full"}),
    "pp2 vpp2": (Layout(ParallelConfig(pp=2, vpp=2)), {"recompute": "full"}),
}
# As in test_layouts: clipping on, eps above the noise of tiny gradients.
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, eps=1e-4)
NEW = [name for name in MODELS if name != "qwen3"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("architectures")
    run_ranks(run_cases, 2, folder, timeout_s=600)
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name in NEW:
        for case in CASES:
            files = sorted(folder.glob(f"{name}.{case}.*.safetensors"))
            found[name, case] = {k: v for file in files for k, v in load_file(file).items()}
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case != REFERENCE])
@pytest.mark.parametrize("name", NEW)
def test_equals_one_rank(results: Any, name: str, case: str) -> None:
    expected, found = results[name, REFERENCE], results[name, case]
    assert found.keys() == expected.keys()
    wrong = {}
    for key, x in expected.items():
        error = float((found[key] - x).abs().max() / x.abs().max().clamp(min=1e-8))
        if not error < 1e-4:
            wrong[key] = error
    assert not wrong


@pytest.mark.parametrize("name", NEW)
def test_what_has_a_gradient_is_what_is_trained(results: Any, name: str) -> None:
    found = results[name, REFERENCE]
    assert all(x.isfinite().all() for x in found.values())
    every = {t.sent_as: p.rule.kind for p in model_parameters(MODELS[name]) for t in p.tensors}
    gradients = {k.removeprefix("gradient/"): x for k, x in found.items() if "gradient/" in k}
    assert gradients.keys() == {tensor for tensor, kind in every.items() if kind == "trained"}
    # Some expert sees no token; whatever else is wired up has a gradient.
    assert not [n for n, x in gradients.items() if not x.any() and ".mlp.experts." not in n]
    for parameter in model_parameters(MODELS[name]):
        for tensor in parameter.tensors:
            weight = found[f"weight/{tensor.sent_as}"]
            if weight.shape != tensor.shape:
                weight = tensor.stacked.within(weight, tensor.expert)
            moved = not torch.equal(weight, seeded_tensor(tensor))
            if not moved and tensor.expert is not None and weight.ndim == 1:
                continue  # a bias of an expert that saw no token, which no decay moves either
            assert moved == (every[tensor.sent_as] == "trained"), tensor.name


def test_mtp_layers_change_nothing(results: Any) -> None:
    for case in CASES:
        without, found = results["deepseek mla", case], results["deepseek mtp", case]
        extra = {k for k in found if ".layers.4." in k or ".layers.5." in k}
        assert {k.split("/")[0] for k in extra} == {"weight"}
        assert found.keys() - extra == without.keys()
        assert all(torch.equal(found[k], without[k]) for k in without), case


def test_one_rank(tmp_path: Path) -> None:
    run_ranks(check, 1, tmp_path)


# On the ranks


def run_cases(rank: int, folder: Path) -> None:
    for name in NEW:
        for case, (layout, _) in CASES.items():
            if rank < layout.parallel.world_size:
                _run_case(rank, folder, name, case)
    check_sinks_and_biases_change_ranks(rank, folder)


def _run_case(rank: int, folder: Path, name: str, case: str) -> None:
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.optimizer import build_optimizer, take_step
    from rltrain.verification.observation import whole_gradients
    from rltrain.weights.sync.sender import full_tensors

    arch, (layout, options) = MODELS[name], CASES[case]
    init = rendezvous(folder, f"{name}.{case}")
    mesh = init_mesh(layout.parallel, rank, layout.parallel.world_size, init, CPU)
    if options is PARTS:  # Megatron refuses to recompute what is not there
        parts = {"mla_up_proj": arch.mla, "shared_experts": arch.shared_expert_size, "moe_act": 1}
        options = {**PARTS, "recompute_modules": [part for part, has in parts.items() if has]}
    policy = PolicyConfig.model_validate({"parallel": layout.parallel, **options})
    chunks = build(mesh, arch, policy)
    optimizer, learning_rate = build_optimizer(chunks, OPTIMIZER, policy.precision, CPU)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    logits, loss = forward_backward(chunks, layout, mesh)
    found = {f"logits/{i}": x for i, x in logits.items()}
    if mesh.is_last_stage:
        found["loss"] = loss
    found |= {f"gradient/{n}": x for n, x in whole_gradients(chunks, arch, mesh).items()}
    learning_rate.step()
    found["norm"] = torch.tensor(take_step(optimizer, chunks))
    found |= {f"weight/{n}": x.clone() for n, x in full_tensors(chunks, arch, mesh, torch.float32)}
    for n, x in full_tensors(chunks, arch, mesh, torch.bfloat16):
        is_bias = n.endswith("e_score_correction_bias")
        assert torch.equal(x, found[f"weight/{n}"].to(torch.float32 if is_bias else torch.bfloat16))
        assert x.dtype == (torch.float32 if is_bias else torch.bfloat16), n
    whole = {n.removeprefix("weight/"): x for n, x in found.items() if n.startswith("weight/")}
    check_stages(chunks, arch, mesh, whole)
    save_file(found, folder / f"{name}.{case}.{rank}.safetensors")
    destroy_mesh()


def build(
    mesh: Any, arch: Architecture, policy: PolicyConfig | None = None, **options: Any
) -> list[nn.Module]:
    from rltrain.policy.megatron.megatron_model import build_model

    chunks = build_model(
        arch, policy or PolicyConfig(), mesh, device=CPU, routing_replay=True, **options
    )
    fill_seeded(chunks, arch, mesh)
    return chunks


def check(rank: int, folder: Path) -> None:
    """All checks below, in one process and one world."""
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh

    mesh = init_mesh(ParallelConfig(), rank, 1, rendezvous(folder, "one"), CPU)
    check_names(mesh)
    check_routing_rule(mesh)
    check_latent_attention(mesh)
    check_only_decoder_routers_replay(mesh)
    check_megatrons_own_mtp(mesh)
    check_loading(mesh, folder)
    check_latent_queries_without_a_latent(mesh)
    destroy_mesh()
    check_checkpoints_are_whole(folder)


def names_of(chunk: Any) -> set[str]:
    persistent = {n for n in chunk.module.state_dict() if not n.endswith("_extra_state")}
    return {n for n in persistent if ".experts.linear" not in n}


def check_names(mesh: Any) -> None:
    """Transformer Engine's, as megatron-core uses them."""
    ends = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
    ends.add("output_layer.weight")
    plain = {"linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight"}
    latent = {f"linear_{x}_down_proj.weight" for x in ("q", "kv")} | {"linear_proj.weight"}
    latent |= {
        f"linear_{x}_up_proj.{w}" for x in ("q", "kv") for w in ("weight", "layer_norm_weight")
    }
    dense = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    moe = {"pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"}
    moe |= {f"mlp.shared_experts.linear_fc{n}.weight" for n in (1, 2)}
    plain = {f"self_attention.{x}" for x in plain}
    latent = {f"self_attention.{x}" for x in latent} | {"input_layernorm.weight"}
    for arch, attention in ((DEEPSEEK_LIKE, plain), (LATENT, latent), (WITH_MTP, latent)):
        expected = set(ends)
        for layer in range(4):
            rest = moe if layer in arch.moe_layers else dense
            expected |= {f"decoder.layers.{layer}.{x}" for x in attention | rest}
        for layer in range(arch.mtp_layers):
            own = {f"{x}.weight" for x in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
            own |= {f"transformer_layer.{x}" for x in attention | moe}
            expected |= {f"mtp.layers.{layer}.{x}" for x in own}
        [chunk] = build(mesh, arch)
        assert names_of(chunk) == expected


def routing_rule(hidden: Any, weight: Any, bias: Any, arch: Architecture) -> Any:
    """DeepSeek's, token by token, from its reports: weight of every expert, 0 if not chosen."""
    result = np.zeros((len(hidden), arch.num_experts))
    per_group = arch.num_experts // arch.num_groups
    for token, x in enumerate(hidden):
        softmax = arch.score_function == "softmax"  # V2
        logits = weight @ x
        scores = np.exp(logits) / np.exp(logits).sum() if softmax else 1 / (1 + np.exp(-logits))
        biased = scores + bias
        groups = [range(g * per_group, (g + 1) * per_group) for g in range(arch.num_groups)]
        best = 1 if softmax else 2
        of_group = [sum(sorted(biased[list(group)])[-best:]) for group in groups]
        allowed = sorted(range(arch.num_groups), key=lambda g: -of_group[g])
        eligible = [e for g in allowed[: arch.groups_per_token] for e in groups[g]]
        chosen = sorted(eligible, key=lambda e: -biased[e])[: arch.experts_per_token]
        total = 1 if softmax else sum(scores[e] for e in chosen)
        for e in chosen:
            result[token, e] = arch.routed_scaling * scores[e] / total
    return result


def check_routing_rule(mesh: Any) -> None:
    from rltrain.policy.megatron.megatron_model import decoder_routers
    from rltrain.policy.passes.replay import tapped

    variants = [
        DEEPSEEK_LIKE,
        replace(DEEPSEEK_LIKE, expert_bias=False),
        replace(DEEPSEEK_LIKE, num_groups=1, groups_per_token=1),
        replace(DEEPSEEK_LIKE, routed_scaling=1.0),
        replace(DEEPSEEK_LIKE, num_groups=2, groups_per_token=1, experts_per_token=2),
        replace(DEEPSEEK_LIKE, groups_per_token=3),
        replace(DEEPSEEK_LIKE, score_function="softmax", expert_bias=False, norm_topk_prob=False),
    ]
    hidden = torch.randn(200, 1, 32, generator=torch.Generator().manual_seed(3))
    choices = []
    for arch in variants:
        [chunk] = build(mesh, arch, ddp=False)
        router: Any = decoder_routers(chunk)[2]
        bias = router.expert_bias.numpy() if arch.expert_bias else 0
        expected = routing_rule(
            hidden[:, 0].double().numpy(), router.weight.detach().double().numpy(), bias, arch
        )
        with tapped({2: router}, num_micro_batches=1) as taps, taps.forward(0, None):
            through_a_tap = router(hidden)
        for weights, chosen in (router(hidden), through_a_tap):
            assert np.array_equal(chosen.numpy(), expected > 0)
            np.testing.assert_allclose(weights.detach().numpy(), expected, rtol=1e-5, atol=1e-7)
        choices.append(expected > 0)
    # Each setting matters, or the comparison would not see it.
    assert (choices[0] != choices[1]).any(1).mean() > 0.3
    assert (choices[0] != choices[2]).any(1).mean() > 0.3


def latent_attention(x: Tensor, tensors: dict[str, Tensor], arch: Architecture) -> Tensor:
    """DeepSeek-V3's, of one sequence, from its report and its own names and order of weights."""
    mla, length = arch.mla, len(x)
    assert mla

    def weight(name: str) -> Tensor:
        return tensors[f"model.layers.0.self_attn.{name}.weight"].double()

    def normed(latent: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(latent, latent.shape[1:], weight(name), arch.norm_eps)

    def turned(pairs: Tensor) -> Tensor:  # [t, heads, d]: neighbours are the two parts of a number
        steps = torch.arange(0, mla.qk_rope_head_dim, 2).double() / mla.qk_rope_head_dim
        angles = torch.outer(torch.arange(length).double(), arch.rope_theta**-steps)
        numbers = torch.view_as_complex(pairs.unflatten(2, (-1, 2)).contiguous())
        return torch.view_as_real(
            numbers * torch.polar(torch.ones(()).double(), angles)[:, None]
        ).flatten(2)

    query = normed(x @ weight("q_a_proj").T, "q_a_layernorm") @ weight("q_b_proj").T
    query = query.unflatten(1, (arch.num_heads, -1))
    latent = x @ weight("kv_a_proj_with_mqa").T
    latent, key_turned = latent.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=1)
    both = normed(latent, "kv_a_layernorm") @ weight("kv_b_proj").T
    both = both.unflatten(1, (arch.num_heads, -1))
    key, value = both.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=2)
    key_turned = turned(key_turned.unsqueeze(1)).expand(-1, arch.num_heads, -1)
    plain, to_turn = query.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=2)
    query = torch.cat([plain, turned(to_turn)], dim=2)
    key = torch.cat([key, key_turned], dim=2)
    scores = torch.einsum("qhd,khd->hqk", query, key) / mla.qk_head_dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(2), value).flatten(1) @ weight("o_proj").T


def check_latent_attention(mesh: Any) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    arch = replace(LATENT, rotary_scaling=None)  # with YaRN: test_families, against transformers
    [chunk] = build(mesh, arch, ddp=False)
    tensors = {t.name: seeded_tensor(t) for p in model_parameters(arch) for t in p.tensors}
    hidden = torch.randn(12, 1, 32, generator=torch.Generator().manual_seed(6))
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, None, None, 7, 7)
    attention: Any = chunk.decoder.layers[0].self_attention
    found, _ = attention(hidden, None, packed_seq_params=packed)
    expected = torch.cat(
        [latent_attention(x, tensors, arch) for x in hidden[:, 0].double().split([5, 7])]
    )
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=1e-4, atol=1e-5)


def check_only_decoder_routers_replay(mesh: Any) -> None:
    """The same routes in the same places with MTP layers as without, and their routers at rest."""
    from rltrain.policy.megatron.megatron_model import decoder_routers

    logits, grads = [], []
    for arch in (LATENT, WITH_MTP):
        [chunk] = build(mesh, arch)
        routers: Any = decoder_routers(chunk)
        assert sorted(routers) == [1, 2, 3]
        for name, module in chunk.module.named_modules():
            if name.startswith("mtp"):
                module.register_forward_pre_hook(_fail)
        for layer in [*chunk.module.mtp.layers] if arch.mtp_layers else []:
            router = layer.transformer_layer.mlp.router
            router.router_replay.get_replay_topk = _fail
            assert router not in routers.values()
        found, gradients = _replayed(mesh, chunk, routers)
        logits.append(found)
        grads.append(gradients)
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def _fail(*_: Any) -> None:
    raise AssertionError("an MTP layer ran")


def _replayed(mesh: Any, chunk: Any, routers: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    from rltrain.policy.passes.replay import Target, tapped

    generator = torch.Generator().manual_seed(5)
    seen: dict[int, Tensor] = {}
    for number, router in routers.items():
        router.register_forward_hook(
            lambda module, args, out, number=number: seen.update({number: out[1]})
        )
    chunk.zero_grad_buffer()
    with tapped(routers, num_micro_batches=4) as taps:
        numbers = iter(range(4))
        whole = chunk.forward

        def forward(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows = tokens.shape[1]
            targets = {
                layer: Target(
                    torch.rand(rows, 16, generator=generator).topk(4).indices.to(torch.uint8),
                    torch.ones(rows, dtype=torch.bool),
                )
                for layer in routers
            }
            with taps.forward(next(numbers), targets):
                output = whole(tokens, *args, **kwargs)
            for layer, target in targets.items():
                chosen = seen[layer].nonzero()[:, 1].view(rows, 4)
                assert torch.equal(chosen, target.experts.long().sort().values)
            return output

        chunk.forward = forward
        logits, _ = forward_backward([chunk], Layout(), mesh)
    named = chunk.module.named_parameters()
    return list(logits.values()), {n: p.main_grad.clone() for n, p in named if p.requires_grad}


def check_megatrons_own_mtp(mesh: Any) -> None:
    """What ADR 8 says of it. When this fails, read the ADR again."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    from rltrain.policy.megatron import megatron_model as model

    before = len(RouterReplay.global_router_replay_instances)
    config = model.transformer_config(
        DEEPSEEK_LIKE, PolicyConfig(), mesh, device=CPU, routing_replay=True
    )
    config.mtp_num_layers = 1
    spec = model.torch_block_spec(config, vp_stage=None)
    ours = build(mesh, replace(DEEPSEEK_LIKE, mtp_layers=1), ddp=False)[0].mtp
    assert isinstance(ours, MultiTokenPredictionBlock)
    assert len(RouterReplay.global_router_replay_instances) - before == 3 + 1
    built = GPTModel(
        config, spec, 61, 64, position_embedding_type="rope", mtp_block_spec=ours.submodules
    )
    ran = []
    built.mtp.layers[0].transformer_layer.mlp.router.register_forward_hook(lambda *_: ran.append(1))
    ends = torch.tensor([0, 6], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, None, None, 6, 6)
    tokens = torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'clone'"):
        built(tokens, tokens, None, packed_seq_params=packed)
    assert ran


def check_loading(mesh: Any, folder: Path) -> None:
    """A folder of such a model, the bias and the MTP layers too; what lacks one is refused."""
    from rltrain.policy.megatron.megatron_model import build_model
    from rltrain.weights.huggingface.export import write_safetensors
    from rltrain.weights.huggingface.load import load_huggingface
    from rltrain.weights.sync.sender import full_tensors

    arch, whole, lacking = WITH_MTP, folder / "whole", folder / "lacking"
    tensors = {t.name: seeded_tensor(t) for p in model_parameters(arch) for t in p.tensors}
    bias = "model.layers.5.mlp.gate.e_score_correction_bias"
    for path, left_out in ((whole, None), (lacking, bias)):
        path.mkdir()
        write_safetensors(path, ((n, x) for n, x in tensors.items() if n != left_out), 2**30)
    chunks = build_model(arch, PolicyConfig(), mesh, device=CPU, routing_replay=False)
    load_huggingface(whole, chunks, arch, mesh)
    found = dict(full_tensors(chunks, arch, mesh, torch.float32))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], x) for n, x in tensors.items())
    with pytest.raises(ValueError, match=bias):
        load_huggingface(lacking, chunks, arch, mesh)


def check_latent_queries_without_a_latent(mesh: Any) -> None:
    assert LATENT.mla
    arch = replace(LATENT, mla=replace(LATENT.mla, q_lora_rank=None))
    [chunk] = build(mesh, arch)
    names = names_of(chunk)
    assert "decoder.layers.0.self_attention.linear_q_proj.weight" in names
    assert not any("linear_q_down" in name for name in names)
    chunk.zero_grad_buffer()
    forward_backward([chunk], Layout(), mesh)
    grads = [p.main_grad for p in chunk.module.parameters() if p.requires_grad]
    assert all(x.isfinite().all() for x in grads)


def check_sinks_and_biases_change_ranks(rank: int, folder: Path) -> None:
    """A checkpoint of gpt-oss that two ranks wrote, read by one."""
    from rltrain.policy import model_checkpoint as checkpoint
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.optimizer import build_optimizer
    from rltrain.weights.mapping.grid import GridPosition
    from rltrain.weights.mapping.local_parameters import local_parameters

    arch, path = MODELS["gpt-oss"], folder / "two ranks"
    path.mkdir(exist_ok=True)
    for parallel in (ParallelConfig(tp=2, ep=2), ParallelConfig()):
        if rank >= parallel.world_size:
            continue
        init = rendezvous(folder, f"checkpoint of {parallel.world_size}")
        mesh = init_mesh(parallel, rank, parallel.world_size, init, CPU)
        chunks = build(mesh, arch)
        optimizer, rate = build_optimizer(chunks, OPTIMIZER, PolicyConfig().precision, CPU)
        if parallel.world_size == 2:
            checkpoint.save_model(str(path), chunks, optimizer, rate, mesh)
        else:
            held = local_parameters(chunks, arch, GridPosition())
            saved = {name: x.clone() for name, x in held.items()}
            for x in held.values():
                x.data.fill_(7.0)
            checkpoint.load_model(str(path), chunks, optimizer, rate, mesh)
            assert all(torch.equal(held[name], x) for name, x in saved.items())
        destroy_mesh()


def check_checkpoints_are_whole(folder: Path) -> None:
    """Buffers and frozen layers are in them."""
    from rltrain.policy import model_checkpoint as checkpoint
    from rltrain.policy.megatron.mesh import destroy_mesh, init_mesh
    from rltrain.policy.optimizer import build_optimizer
    from rltrain.weights.mapping.grid import GridPosition
    from rltrain.weights.mapping.local_parameters import local_parameters

    mesh = init_mesh(ParallelConfig(), 0, 1, rendezvous(folder, "checkpoint"), CPU)
    (folder / "checkpoint").mkdir()
    saved: dict[str, Tensor] = {}
    for step in ("save", "load"):
        chunks = build(mesh, WITH_MTP)
        optimizer, rate = build_optimizer(chunks, OPTIMIZER, PolicyConfig().precision, CPU)
        held = local_parameters(chunks, WITH_MTP, GridPosition())
        if step == "save":
            checkpoint.save_model(str(folder / "checkpoint"), chunks, optimizer, rate, mesh)
            saved = {n: x.clone() for n, x in held.items()}
            continue
        for x in held.values():
            x.data.fill_(7.0)
        checkpoint.load_model(str(folder / "checkpoint"), chunks, optimizer, rate, mesh)
        assert all(torch.equal(held[n], x) for n, x in saved.items())
    destroy_mesh()
