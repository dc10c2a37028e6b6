"""The rules of DeepSeek-V3's weights, without a model."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from rltrain.weights.architecture.decoder import MLA, Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.assembly import to_huggingface, to_megatron
from rltrain.weights.mapping.grid import AxisPosition, GridPosition
from rltrain.weights.mapping.local_parameters import local_parameters
from rltrain.weights.mapping.parameters import HfTensorSpec

LATENT = MLA(q_lora_rank=3, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=7)
ARCH = Architecture(
    family="deepseek_v3",
    num_layers=3,
    hidden_size=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=6,
    ffn_size=8,
    vocab_size=9,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=16,
    num_experts=8,
    experts_per_token=4,
    expert_size=4,
    norm_topk_prob=True,
    moe_layers=(1, 2),
    score_function="sigmoid",
    expert_bias=True,
    num_groups=4,
    groups_per_token=2,
    shared_expert_size=12,
    mla=LATENT,
)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    return replace(
        ARCH,
        mla=draw(st.sampled_from([None, LATENT, replace(LATENT, q_lora_rank=None)])),
        qk_norm=draw(st.sampled_from(["none", "heads", "all"])),
        expert_bias=draw(st.booleans()),
        shared_expert_size=draw(st.sampled_from([0, 12])),
        mtp_layers=draw(st.integers(0, 2)),
        moe_layers=draw(st.sampled_from([(1, 2), (0,)])),
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(architectures(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
@example(replace(ARCH, mtp_layers=2), 2, 2)
def test_cut_over_any_ranks_and_put_together_again(arch: Architecture, tp: int, etp: int):
    tensors = [t for p in model_parameters(arch) if not p.copy for t in p.tensors]
    assert len({t.name for t in tensors}) == len(tensors)
    generator = torch.Generator().manual_seed(0)
    stored = {t.name: torch.rand(t.shape, generator=generator) for t in tensors}

    def read(tensor: HfTensorSpec, dim: int, start: int, stop: int):
        return stored[tensor.name].narrow(dim, start, stop - start)

    back = {}
    for parameter in model_parameters(arch):
        size = parameter.axis(GridPosition(tp=AxisPosition(0, tp), etp=AxisPosition(0, etp))).size
        shards = [
            to_megatron(parameter, read, arch, AxisPosition(rank, size)) for rank in range(size)
        ]
        back |= dict(to_huggingface(parameter, shards, arch))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored)


def test_names_and_shapes_are_those_of_transformers():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=9,
        hidden_size=4,
        intermediate_size=8,
        moe_intermediate_size=4,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=3,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=3,
        kv_lora_rank=5,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=7,
    )
    with torch.device("meta"):
        state = DeepseekV3ForCausalLM(config).state_dict()
    found = {}
    for tensor in (t for p in model_parameters(ARCH) for t in p.tensors):
        if tensor.stacked and tensor.stacked.name in state:
            found[tensor.stacked.name] = tensor.stacked.shape(8, tensor.shape)
        else:
            found[tensor.name] = tensor.shape
    assert found == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_mtp_layers_lie_behind_the_last_layer():
    found = {p.name: p for p in model_parameters(replace(ARCH, mtp_layers=2))}
    eh_proj = found["mtp.layers.1.eh_proj.weight"]
    assert [(t.name, t.shape) for t in eh_proj.tensors] == [
        ("model.layers.4.eh_proj.weight", (4, 8))
    ]
    norm = found["mtp.layers.0.final_layernorm.weight"]
    assert norm.tensors[0].name == "model.layers.3.shared_head.norm.weight"
    bias = found["mtp.layers.0.transformer_layer.mlp.router.expert_bias"]
    assert bias.tensors[0].name == "model.layers.3.mlp.gate.e_score_correction_bias"
    expert = found["mtp.layers.0.transformer_layer.mlp.experts.linear_fc2.weight7"]
    assert expert.tensors[0].name == "model.layers.3.mlp.experts.7.down_proj.weight"
    kinds = {name: p.rule.kind for name, p in found.items()}
    assert {kind for name, kind in kinds.items() if name.startswith("mtp")} == {"frozen", "buffer"}
    assert {k for n, k in kinds.items() if not n.startswith("mtp")} == {"trained", "buffer"}
    assert all((kind == "buffer") == name.endswith("expert_bias") for name, kind in kinds.items())


def test_the_bias_is_a_buffer_and_megatrons_other_buffers_are_not_held():
    router = nn.Module()
    router.weight = nn.Parameter(torch.zeros(1))
    router.register_buffer("expert_bias", torch.zeros(1))
    router.register_buffer("local_tokens_per_expert", torch.zeros(1), persistent=False)
    layer = nn.Module()
    layer.mlp = nn.Module()
    layer.mlp.router, layer.layer_number = router, 2
    names = {
        p.name
        for p in model_parameters(ARCH)
        if p.layer == 1 and not p.name.endswith("expert_bias")
    }
    for name in names - {"decoder.layers.1.mlp.router.weight"}:
        *path, last = name.removeprefix("decoder.layers.1.").split(".")
        module = layer
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.zeros(1)))
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([layer])
    second_stage = GridPosition(pp=AxisPosition(1, 2))
    held = local_parameters([model], ARCH, second_stage)
    assert held.keys() == names | {"decoder.layers.1.mlp.router.expert_bias"}
    assert held["decoder.layers.1.mlp.router.expert_bias"] is router.expert_bias
    del router.expert_bias
    with pytest.raises(ValueError, match=r"no parameter for deepseek_v3's .*router\.expert_bias"):
        local_parameters([model], ARCH, second_stage)
    router.register_buffer("expert_bias", torch.zeros(1))
    without = replace(ARCH, expert_bias=False)
    with pytest.raises(ValueError, match=r"no weights for the model's .*router\.expert_bias"):
        local_parameters([model], without, second_stage)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_function": "softmax"}, "needs score_function='sigmoid'"),
        ({"norm_topk_prob": False}, "needs norm_topk_prob=True"),
        ({"num_groups": 3}, "num_groups=3 must divide num_experts=8"),
        ({"groups_per_token": 5}, "at least groups_per_token=5"),
        ({"groups_per_token": 1}, "2 experts have no experts_per_token=4"),
        ({"num_groups": 8, "groups_per_token": 4}, "no two experts to score a group"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 must be num_heads=4"),
        ({"head_dim": 4}, "head_dim=4 must be qk_head_dim=6"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(ARCH, **changes)
