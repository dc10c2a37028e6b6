"""The published config.json of DeepSeek, Moonlight, Kimi-K2 and GLM-4.5, and what is refused.

Quantisation aside: that of DeepSeek-V3 and Kimi-K2 is left out here.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rltrain.weights.architecture import MLA, Architecture, Yarn
from rltrain.weights.families import architecture_from_config, read_architecture

SHARED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    **SHARED,
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "transformers_version": "4.33.1",
    "vocab_size": 102400,
}
DEEPSEEK_V2: dict[str, Any] = {
    **DEEPSEEK_V2_LITE,
    "ep_size": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
DEEPSEEK_V3: dict[str, Any] = {
    **SHARED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**DEEPSEEK_V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "transformers_version": "4.33.1",
    "vocab_size": 129280,
}
MOONLIGHT: dict[str, Any] = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name != "rope_scaling"},
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_45: dict[str, Any] = {
    **GLM_45_AIR,
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
PUBLISHED = {
    "V2-Lite": DEEPSEEK_V2_LITE,
    "V2": DEEPSEEK_V2,
    "V3": DEEPSEEK_V3,
    "Moonlight": MOONLIGHT,
    "Kimi-K2": KIMI_K2,
    "GLM-4.5-Air": GLM_45_AIR,
    "GLM-4.5": GLM_45,
}
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
    "V2-Lite": V2_LITE_IS,
    "V2": replace(
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
    "V3": V3_IS,
    "Moonlight": replace(
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
    "Kimi-K2": replace(
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_published(name: str):
    assert architecture_from_config(PUBLISHED[name], "here") == ARCHITECTURES[name]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "Kimi-K2"])
def test_as_transformers_5_writes_it(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], "auto_map": {}}))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written and "rope_theta" not in written
    assert read_architecture(tmp_path) == ARCHITECTURES[name]


@pytest.mark.parametrize(
    ("published", "changes", "named"),
    [
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        (DEEPSEEK_V2, {"topk_method": "greedy"}, "n_group=8"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        (DEEPSEEK_V3, {"scoring_func": None}, "vLLM takes a model without it for another"),
        (DEEPSEEK_V3, {"topk_method": None}, "vLLM takes a model without it for another"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias=True"),
        (DEEPSEEK_V3, {"head_dim": 192}, "head_dim=192"),
        (DEEPSEEK_V3, {"qk_head_dim": 128}, "qk_head_dim=128"),
        (DEEPSEEK_V3, {"num_key_value_heads": 64}, "num_kv_heads=64 must be num_heads=128"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "leaves none with a router"),
        (DEEPSEEK_V3, {"norm_topk_prob": False}, "needs norm_topk_prob=True"),
        (DEEPSEEK_V3, {"n_group": 7}, "num_groups=7 must divide"),
        (DEEPSEEK_V3, {"n_group": 256, "topk_group": 8}, "no two experts"),
        (DEEPSEEK_V3, {"n_group": 128, "topk_group": 2}, "have no experts_per_token=8"),
        (DEEPSEEK_V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (DEEPSEEK_V3, {"index_topk": 2048}, "index_topk"),  # V3.2: sparse attention
        (GLM_45, {"partial_rotary_factor": None, "rope_parameters": {}}, "partial_rotary_factor"),
        (GLM_45, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_what_would_change_the_forward_is_refused(
    published: dict[str, Any], changes: dict[str, Any], named: str
):
    config = {k: v for k, v in {**published, **changes}.items() if v is not None}
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
    given = {**DEEPSEEK_V3["rope_scaling"], **scaling}
    with pytest.raises(ValueError, match=named):
        architecture_from_config({**DEEPSEEK_V3, "rope_scaling": given}, "here")
