"""config.json is read in full: every field is used, harmless, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from rltrain.config.hydra_groups import conf_folder
from rltrain.verification.layout_models import MODELS
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import architecture_from_config, model_parameters, read_architecture

QWEN3_30B_A3B: dict[str, Any] = json.loads(
    (conf_folder() / "model" / "Qwen3-30B-A3B" / "config.json").read_text()
)


def read(**changes: Any) -> Architecture:
    config = {**QWEN3_30B_A3B, **changes}
    return architecture_from_config({k: v for k, v in config.items() if v != "absent"}, "here")


def test_published_qwen3_30b_a3b():
    assert read() == Architecture(
        family="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_size=6144,
        vocab_size=151936,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=40960,
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
        norm_topk_prob=True,
        moe_layers=tuple(range(48)),
        qk_norm="heads",
    )


def test_what_transformers_5_writes_reads_the_same(tmp_path: Path):
    skipped = ("torch_dtype", "transformers_version", "model_type", "rope_scaling", "rope_theta")
    config = Qwen3MoeConfig(
        **{k: v for k, v in QWEN3_30B_A3B.items() if k not in skipped},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "num_experts" not in written and "rope_theta" not in written
    assert read_architecture(tmp_path) == read()


def test_dense_qwen3_has_no_routers(tmp_path: Path):
    config = Qwen3Config(hidden_size=32, num_hidden_layers=2, tie_word_embeddings=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    arch = read_architecture(tmp_path)
    assert (arch.family, arch.num_experts, arch.moe_layers) == ("qwen3", 0, ())
    assert arch.tie_embeddings


def test_layers_without_a_router():
    assert read(num_hidden_layers=4, decoder_sparse_step=2).moe_layers == (1, 3)
    assert read(num_hidden_layers=4, mlp_only_layers=[0, 2]).moe_layers == (1, 3)


def test_vocabulary_is_padded_to_a_multiple_of_tp():
    arch = read(vocab_size=10)
    assert [arch.padded_vocab_size(tp) for tp in (1, 2, 4, 8)] == [10, 10, 12, 16]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3Moe.*docs/models"),
        ({"architectures": "absent"}, r"architectures=\[\].*Qwen3Moe.*docs/models"),
        ({"rope_scaling": {"rope_type": "yarn", "factors": 4.0}}, "rope_scaling.*yarn.*factors"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope_scaling.*factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*linear"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            },
            "rope_scaling and rope_parameters differ in rope_type: 'linear' and 'default'",
        ),
        ({"rope_theta": "absent"}, "rope_theta is missing"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be a positive"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok=200"),
        ({"num_experts_per_tok": 1}, "router cannot learn"),
        ({"norm_topk_prob": "absent"}, "norm_topk_prob"),
        ({"decoder_sparse_step": 100}, "decoder_sparse_step=100"),
    ],
)
def test_what_would_change_the_forward_is_refused(changes: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        read(**changes)


def test_broken_folders(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON object"):
        read_architecture(tmp_path)


def test_a_critic_is_the_model_without_its_output_layer() -> None:
    arch = MODELS["deepseek mtp"]
    critic = arch.with_value_head()
    names, trunk = ([p.name for p in model_parameters(a)] for a in (arch, critic))
    assert trunk == [n for n in names if not n.startswith(("mtp.", "output_layer"))]
    assert len(trunk) < len(names) - 1
    tied = replace(MODELS["qwen3"], tie_embeddings=True).with_value_head()
    assert model_parameters(tied) == model_parameters(MODELS["qwen3"].with_value_head())
