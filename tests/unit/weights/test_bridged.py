"""A family that is not mapped: refused with a way out, or read for Megatron-Bridge if asked."""

from typing import Any

import pytest

from rltrain.weights import families
from rltrain.weights.bridged import bridged_architecture
from rltrain.weights.families import architecture_from_config

MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "head_dim": None,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": 32768,
}


def test_the_error_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(*, bridge: bool) -> str:
        with pytest.raises(ValueError, match=r"MistralForCausalLM.*supported are .*Qwen3Moe") as e:
            architecture_from_config(MISTRAL, "here/config.json", bridge=bridge)
        return str(e.value)

    monkeypatch.setattr("rltrain.weights.bridged.is_installed", lambda: False)
    monkeypatch.setattr(families, "is_installed", lambda: False)
    assert "Install megatron-bridge and set model.bridge=true" in refusal(bridge=False)
    assert "Install megatron-bridge for model.bridge=true" in refusal(bridge=True)
    monkeypatch.setattr("rltrain.weights.bridged.is_installed", lambda: True)
    assert "model.bridge=true lets megatron-bridge, which is installed" in refusal(bridge=False)


def test_only_what_is_not_mapped_goes_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "is_installed", lambda: True)
    assert architecture_from_config(MISTRAL, "here", bridge=True).family == "bridged"
    mapped = MISTRAL | {"architectures": ["LlamaForCausalLM"]}
    assert architecture_from_config(mapped, "here", bridge=True).family == "llama"
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM cannot be trained"):
        refused = MISTRAL | {"architectures": ["Qwen3NextForCausalLM"]}
        architecture_from_config(refused, "here", bridge=True)


def test_sizes() -> None:
    arch = bridged_architecture(MISTRAL, "here")
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (6, 32, 8, 128)
    assert (arch.vocab_size, arch.max_positions, arch.num_experts) == (32768, 32768, 0)
    assert arch.moe_layers == ()
    shorter = {**MISTRAL, "model_max_length": 4096}
    assert bridged_architecture(shorter, "here").max_positions == 4096
    named = {**MISTRAL, "max_position_embeddings": None, "n_positions": 512}
    assert bridged_architecture(named, "here").max_positions == 512
    with pytest.raises(ValueError, match="here: field num_hidden_layers is missing"):
        bridged_architecture({**MISTRAL, "num_hidden_layers": None}, "here")
    with pytest.raises(ValueError, match="more than text"):
        bridged_architecture({"text_config": MISTRAL}, "here")


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
    ],
)
def test_the_layers_with_a_router(said: dict[str, Any], layers: tuple[int, ...]) -> None:
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    arch = bridged_architecture(MISTRAL | experts | said, "here")
    assert arch.moe_layers == layers
    assert (arch.num_experts, arch.experts_per_token, arch.expert_size) == (16, 4, 512)
