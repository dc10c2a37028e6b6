"""Published config.json files read right, as transformers 4 wrote them and as 5 writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rltrain.weights.architecture.decoder import Architecture, Llama3Rotary
from rltrain.weights.families import architecture_from_config, read_architecture

FILES = Path(__file__).parent / "published"
EXPECTED = {
    "Llama-2-7b-hf": Architecture(
        family="llama",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn_size=11008,
        vocab_size=32000,
        rope_theta=1e4,  # not in the file: transformers' default
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=4096,
    ),
    "Llama-3.1-8B-Instruct": Architecture(
        family="llama",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        vocab_size=128256,
        rope_theta=5e5,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=131072,
        rotary_scaling=Llama3Rotary(8.0, 1.0, 4.0, 8192),
    ),
    "Mixtral-8x7B-Instruct-v0.1": Architecture(
        family="mixtral",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        vocab_size=32000,
        rope_theta=1e6,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=32768,
        num_experts=8,
        experts_per_token=2,
        expert_size=14336,
        norm_topk_prob=True,
        moe_layers=tuple(range(32)),
    ),
    "OLMoE-1B-7B-0125": Architecture(
        family="olmoe",
        num_layers=16,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        ffn_size=1024,
        vocab_size=50304,
        rope_theta=1e4,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_positions=4096,
        num_experts=64,
        experts_per_token=8,
        expert_size=1024,
        norm_topk_prob=False,
        moe_layers=tuple(range(16)),
        qk_norm="all",
    ),
    "Qwen1.5-MoE-A2.7B": Architecture(
        family="qwen2_moe",
        num_layers=24,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        ffn_size=5632,
        vocab_size=151936,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=8192,
        num_experts=60,
        experts_per_token=4,
        expert_size=1408,
        norm_topk_prob=False,
        moe_layers=tuple(range(24)),
        shared_expert_size=5632,
        shared_expert_gate=True,
        qkv_bias=True,
    ),
    "Qwen2.5-7B": Architecture(
        family="qwen2",
        num_layers=28,
        hidden_size=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        ffn_size=18944,
        vocab_size=152064,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=131072,
        qkv_bias=True,
    ),
}


def published(name: str) -> dict[str, Any]:
    config = json.loads((FILES / f"{name}.json").read_text())
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_file_is_read(name: str) -> None:
    assert architecture_from_config(published(name), name) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_what_transformers_5_writes_of_it_reads_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(name)))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written and "rope_theta" not in written
    assert read_architecture(tmp_path) == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Llama-3.1-8B-Instruct", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("Llama-3.1-8B-Instruct", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("Llama-3.1-8B-Instruct", {"mlp_bias": True}, "mlp_bias=True"),
        (
            "Llama-3.1-8B-Instruct",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling.*low_freq_factor",
        ),
        ("Mixtral-8x7B-Instruct-v0.1", {"sliding_window": 4096}, "sliding_window=4096 is less"),
        ("Mixtral-8x7B-Instruct-v0.1", {"rope_theta": None}, "rope_theta is missing"),
        ("OLMoE-1B-7B-0125", {"clip_qkv": 8.0}, r"clip_qkv=8\.0"),
        ("OLMoE-1B-7B-0125", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("OLMoE-1B-7B-0125", {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        ("OLMoE-1B-7B-0125", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("Qwen1.5-MoE-A2.7B", {"qkv_bias": False}, "qkv_bias=False"),
        ("Qwen2.5-7B", {"use_mrope": True}, "use_mrope=True"),
        ("Qwen2.5-7B", {"head_dim": 64}, "head_dim=64 is not supported, only 128"),
        ("Qwen2.5-7B", {"use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_what_is_not_built_or_not_in_vllm_is_refused(
    name: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        architecture_from_config(published(name) | changes, name)


def test_a_window_as_long_as_the_model_reads_does_not_act() -> None:
    name = "Mixtral-8x7B-Instruct-v0.1"
    found = architecture_from_config(published(name) | {"sliding_window": 32768}, name)
    assert found == EXPECTED[name]
