"""gpt-oss: its config.json, and experts that are always stacked in one tensor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rltrain.config.policy import ParallelConfig
from rltrain.policy.megatron.transformer_options import check_backend_layout
from rltrain.verification.layout_models import GPT_OSS_LIKE
from rltrain.weights.architecture.decoder import Architecture, Yarn
from rltrain.weights.families import architecture_from_config, model_parameters
from rltrain.weights.huggingface.load import open_checkpoint
from rltrain.weights.huggingface.tensor_files import SINGLE
from rltrain.weights.mapping.assembly import to_huggingface, to_megatron
from rltrain.weights.mapping.grid import AxisPosition, GridPosition
from rltrain.weights.mapping.parameters import HfTensorSpec

# openai/gpt-oss-20b as published.
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def read(**changes: Any) -> Architecture:
    config = {**GPT_OSS_20B, **changes}
    return architecture_from_config({k: v for k, v in config.items() if v != "absent"}, "here")


def test_published_gpt_oss_20b():
    expected = Architecture(
        family="gpt_oss",
        num_layers=24,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=2880,
        vocab_size=201088,
        rope_theta=150000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=131072,
        num_experts=32,
        experts_per_token=4,
        expert_size=2880,
        norm_topk_prob=True,
        moe_layers=tuple(range(24)),
        linear_bias=True,
        swiglu_limit=7.0,
        attention_sinks=True,
        window=128,
        windowed_layers=tuple(range(0, 24, 2)),
        rotary_scaling=Yarn(32.0, 4096, truncate=False),
    )
    assert read() == expected
    assert read(layer_types="absent", swiglu_limit="absent", experts_per_token="absent") == expected


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("attention_bias", False, "attention_bias=False is not supported"),
        ("swiglu_limit", 5.0, "swiglu_limit=5.0 is not supported, only 7.0"),
        ("swiglu_alpha", 1.0, "swiglu_alpha=1.0 is not supported"),
        ("layer_types", ["full_attention"] * 24, "layer_types=.* is not supported"),
        ("sliding_window", None, "field sliding_window is missing"),
        ("experts_per_token", 8, "experts_per_token=8 is not supported, only 4"),
        ("rope_scaling", "absent", "rope_scaling or rope_parameters is missing"),
        (
            "rope_scaling",
            {**GPT_OSS_20B["rope_scaling"], "attention_factor": 1.0},
            "attention_factor=1.0 and mscale=None .* not supported",
        ),
        ("head_dim", "absent", "head_dim is missing"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not supported"),
    ],
)
def test_what_another_model_would_come_of_is_refused(field: str, value: Any, problem: str):
    with pytest.raises(ValueError, match=f"here: .*{problem}"):
        read(**{field: value})


def test_qwen3_next_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM cannot be trained: .*gated delta"):
        read(architectures=["Qwen3NextForCausalLM"])


def test_layouts_that_would_be_wrong_are_refused():
    etp = ParallelConfig(tp=2, etp=2)
    with pytest.raises(ValueError, match=r"etp=2: .*biases.*set etp=1"):
        check_backend_layout(GPT_OSS_LIKE, etp, transformer_engine=False)
    cp = ParallelConfig(cp=2)
    with pytest.raises(ValueError, match=r"cp=2: .*transformer_engine=never or cp=1"):
        check_backend_layout(GPT_OSS_LIKE, cp, transformer_engine=True)
    check_backend_layout(GPT_OSS_LIKE, cp, transformer_engine=False)
    check_backend_layout(GPT_OSS_LIKE, ParallelConfig(tp=2, ep=2), transformer_engine=True)


def stacked(arch: Architecture) -> dict[str, Tensor]:
    """A checkpoint as transformers has it, every number another."""
    shapes = {}
    for tensor in (t for p in model_parameters(arch) for t in p.tensors):
        whole = tensor.stacked.shape(arch.num_experts, tensor.shape) if tensor.stacked else None
        shapes[tensor.sent_as] = whole or tensor.shape
    found, start = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        found[name] = torch.arange(start, start + size).view(shape).float()
        start += size
    return found


def test_an_expert_is_every_other_column_of_what_all_of_them_are_in(tmp_path: Path):
    arch = GPT_OSS_LIKE
    whole = stacked(arch)
    save_file(whole, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path, arch)
    experts = "model.layers.1.mlp.experts."

    def local(name: str) -> Tensor:
        found = next(p for p in model_parameters(arch) if p.name == f"decoder.layers.1.mlp.{name}")
        return to_megatron(found, checkpoint.read, arch, AxisPosition())

    both = whole[experts + "gate_up_proj"][3].T
    assert torch.equal(local("experts.linear_fc1.weight3"), torch.cat([both[0::2], both[1::2]]))
    biases = whole[experts + "gate_up_proj_bias"][3]
    assert torch.equal(local("experts.linear_fc1.bias3"), torch.cat([biases[0::2], biases[1::2]]))
    assert torch.equal(local("experts.linear_fc2.weight3"), whole[experts + "down_proj"][3].T)
    assert torch.equal(local("experts.linear_fc2.bias3"), whole[experts + "down_proj_bias"][3])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_read_in_slices_and_put_together_again(tmp_path: Path, size: int):
    arch = GPT_OSS_LIKE
    whole = stacked(arch)
    save_file(whole, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path, arch)
    back = {name: torch.full_like(tensor, -1) for name, tensor in whole.items()}
    for parameter in model_parameters(arch):
        cuts = parameter.axis(
            GridPosition(tp=AxisPosition(0, size), etp=AxisPosition(0, size))
        ).size
        shards = [
            to_megatron(parameter, checkpoint.read, arch, AxisPosition(r, cuts))
            for r in range(cuts)
        ]
        for tensor, (_, values) in zip(
            parameter.tensors, to_huggingface(parameter, shards, arch), strict=True
        ):
            _target(back, tensor).copy_(values)
    assert all(torch.equal(back[name], tensor) for name, tensor in whole.items())


def _target(whole: dict[str, Tensor], tensor: HfTensorSpec) -> Tensor:
    if tensor.stacked is None:
        return whole[tensor.name]
    assert tensor.expert is not None
    return tensor.stacked.within(whole[tensor.sent_as], tensor.expert)


def test_experts_in_mxfp4_are_what_transformers_makes_of_them(tmp_path: Path):
    arch = replace(GPT_OSS_LIKE, num_layers=1, moe_layers=(0,), expert_size=64)
    folder, generator = tmp_path, torch.Generator().manual_seed(0)
    tensors = stacked(arch)
    expected = {}
    for name in ("gate_up_proj", "down_proj"):
        whole = f"model.layers.0.mlp.experts.{name}"
        experts, rows, columns = tensors.pop(whole).shape
        shape = (experts, columns, rows // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).byte()
        scales = torch.randint(120, 130, shape, generator=generator).byte()
        tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(GPT_OSS_20B))
    checkpoint = open_checkpoint(folder, arch)
    for parameter in model_parameters(arch):
        found = to_megatron(parameter, checkpoint.read, arch, AxisPosition())
        if parameter.name.endswith("linear_fc1.weight5"):
            both = expected["gate_up_proj"][5].T
            assert torch.equal(found, torch.cat([both[0::2], both[1::2]]))
        if parameter.name.endswith("linear_fc2.weight5"):
            assert torch.equal(found, expected["down_proj"][5].T)


def test_a_wrong_shape_is_named_as_it_is_stored(tmp_path: Path):
    whole = stacked(GPT_OSS_LIKE)
    name = "model.layers.2.mlp.experts.down_proj"
    save_file({**whole, name: whole[name].mT.contiguous()}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"experts.down_proj has shape \[8, 32, 24\], .*24, 32"):
        open_checkpoint(tmp_path, GPT_OSS_LIKE)
