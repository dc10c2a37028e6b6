"""The published config.json of DeepSeek, Moonlight, Kimi-K2 and GLM-4.5, and what is refused.

Quantisation aside: that of DeepSeek-V3 and Kimi-K2 is left out here.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rltrain.config.hydra_groups import conf_folder
from rltrain.weights.architecture.decoder import MLA, Architecture, Yarn
from rltrain.weights.families import architecture_from_config, read_architecture

FILES = Path(__file__).parent / "published"


def published(name: str) -> dict[str, Any]:
    shipped = conf_folder() / "model" / name / "config.json"  # with a recipe
    file = shipped if shipped.is_file() else FILES / f"{name}.json"
    return dict(json.loads(file.read_text()))


LATENT = MLA(None, 512, 128, 64, 128)
V2_LITE_IS = Architecture(
    family="deepseek_v2",
    num_layers=27,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=192,
    ffn_size=10944,
    vocab_size=102400,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=163840,
    num_experts=64,
    experts_per_token=6,
    expert_size=1408,
    moe_layers=tuple(range(1, 27)),
    shared_expert_size=2816,
    rotary_scaling=Yarn(40, 4096, 32, 1, 0.707, 0.707),
    mla=LATENT,
)
V3_IS = Architecture(
    family="deepseek_v3",
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    ffn_size=18432,
    vocab_size=129280,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=163840,
    num_experts=256,
    experts_per_token=8,
    expert_size=2048,
    norm_topk_prob=True,
    moe_layers=tuple(range(3, 61)),
    score_function="sigmoid",
    expert_bias=True,
    num_groups=8,
    groups_per_token=4,
    routed_scaling=2.5,
    shared_expert_size=2048,
    rotary_scaling=Yarn(40, 4096, 32, 1, 1.0, 1.0),
    mla=replace(LATENT, q_lora_rank=1536),
    mtp_layers=1,
)
AIR_IS = Architecture(
    family="glm4_moe",
    num_layers=46,
    hidden_size=4096,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=10944,
    vocab_size=151552,
    rope_theta=1e6,
    norm_eps=1e-5,
    tie_embeddings=False,
    max_positions=131072,
    num_experts=128,
    experts_per_token=8,
    expert_size=1408,
    norm_topk_prob=True,
    moe_layers=tuple(range(1, 46)),
    score_function="sigmoid",
    expert_bias=True,
    shared_expert_size=1408,
    qkv_bias=True,
    rotary_fraction=0.5,
    mtp_layers=1,
)
ARCHITECTURES = {
    "DeepSeek-V2-Lite": V2_LITE_IS,
    "DeepSeek-V2": replace(
        V2_LITE_IS,
        num_layers=60,
        hidden_size=5120,
        num_heads=128,
        num_kv_heads=128,
        ffn_size=12288,
        num_experts=160,
        expert_size=1536,
        moe_layers=tuple(range(1, 60)),
        num_groups=8,
        groups_per_token=3,
        routed_scaling=16.0,
        shared_expert_size=3072,
        mla=replace(LATENT, q_lora_rank=1536),
    ),
    "DeepSeek-V3": V3_IS,
    "Moonlight-16B-A3B": replace(
        V3_IS,
        num_layers=27,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=16,
        ffn_size=11264,
        vocab_size=163840,
        rope_theta=5e4,
        norm_eps=1e-5,
        max_positions=8192,
        num_experts=64,
        experts_per_token=6,
        expert_size=1408,
        moe_layers=tuple(range(1, 27)),
        num_groups=1,
        groups_per_token=1,
        routed_scaling=2.446,
        shared_expert_size=2816,
        rotary_scaling=None,
        mla=LATENT,
        mtp_layers=0,
    ),
    "Kimi-K2-Instruct": replace(
        V3_IS,
        num_heads=64,
        num_kv_heads=64,
        vocab_size=163840,
        rope_theta=5e4,
        max_positions=131072,
        num_experts=384,
        moe_layers=tuple(range(1, 61)),
        num_groups=1,
        groups_per_token=1,
        routed_scaling=2.827,
        rotary_scaling=Yarn(32.0, 4096, 1.0, 1, 1.0, 1.0),
        mtp_layers=0,
    ),
    "GLM-4.5-Air": AIR_IS,
    "GLM-4.5": replace(
        AIR_IS,
        num_layers=92,
        hidden_size=5120,
        ffn_size=12288,
        num_experts=160,
        expert_size=1536,
        moe_layers=tuple(range(3, 92)),
        routed_scaling=2.5,
        shared_expert_size=1536,
        qk_norm="heads",
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_as_published(name: str):
    assert architecture_from_config(published(name), "here") == ARCHITECTURES[name]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "Kimi" not in name])
def test_as_transformers_5_writes_it(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**published(name), "auto_map": {}}))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written and "rope_theta" not in written
    assert read_architecture(tmp_path) == ARCHITECTURES[name]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("DeepSeek-V2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("DeepSeek-V2", {"topk_method": "greedy"}, "n_group=8"),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("DeepSeek-V3", {"scoring_func": None}, "vLLM takes a model without it for another"),
        ("DeepSeek-V3", {"topk_method": None}, "vLLM takes a model without it for another"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave=False"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias=True"),
        ("DeepSeek-V3", {"head_dim": 192}, "head_dim=192"),
        ("DeepSeek-V3", {"qk_head_dim": 128}, "qk_head_dim=128"),
        ("DeepSeek-V3", {"num_key_value_heads": 64}, "num_kv_heads=64 must be num_heads=128"),
        ("DeepSeek-V3", {"first_k_dense_replace": 61}, "leaves none with a router"),
        ("DeepSeek-V3", {"norm_topk_prob": False}, "needs norm_topk_prob=True"),
        ("DeepSeek-V3", {"n_group": 7}, "num_groups=7 must divide"),
        ("DeepSeek-V3", {"n_group": 256, "topk_group": 8}, "no two experts"),
        ("DeepSeek-V3", {"n_group": 128, "topk_group": 2}, "have no experts_per_token=8"),
        ("DeepSeek-V3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("DeepSeek-V3", {"index_topk": 2048}, "index_topk"),  # V3.2: sparse attention
        (
            "GLM-4.5",
            {"partial_rotary_factor": None, "rope_parameters": {}},
            "partial_rotary_factor",
        ),
        ("GLM-4.5", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_what_would_change_the_forward_is_refused(name: str, changes: dict[str, Any], named: str):
    config = {k: v for k, v in {**published(name), **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=named):
        architecture_from_config(config, "here")


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"mscale_all_dim": None}, "give both or neither"),
        ({"mscale": 0.0}, "give both or neither"),
        ({"attention_factor": 1.0}, "no attention_factor"),
        ({"truncate": False}, "truncate=True"),
        ({"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "rope_scaling"),
    ],
)
def test_rotary_embeddings_that_megatrons_mla_lacks_are_refused(
    scaling: dict[str, Any], named: str
):
    config = published("DeepSeek-V3")
    with pytest.raises(ValueError, match=named):
        architecture_from_config(
            config | {"rope_scaling": config["rope_scaling"] | scaling}, "here"
        )
