"""Rotary frequencies against those of transformers."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rltrain.policy.megatron.rotary import rotary_factor, rotary_frequencies, set_rotary
from rltrain.weights.architecture.decoder import Architecture, Yarn
from rltrain.weights.families import architecture_from_config

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3, other numbers": {
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 16.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn, as Qwen3 has it": {
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn, a given factor": {
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 0.8,
        "original_max_position_embeddings": 512,
    },
    "yarn, two scales": {
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
    },
    "yarn, one scale": {
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": None,
        "original_max_position_embeddings": 512,
    },
}


def architecture(config: LlamaConfig) -> Architecture:
    config.architectures = ["LlamaForCausalLM"]
    return architecture_from_config(json.loads(config.to_json_string()), "here")


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name: str):
    kind = name.split(",")[0]
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": kind, **SCALINGS[name]})
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    found = rotary_frequencies(architecture(config))
    assert rotary_factor(architecture(config)) == pytest.approx(factor, rel=1e-12)
    assert (factor != 1.0) == (kind == "yarn")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    plain = rotary_frequencies(replace(architecture(config), rotary_scaling=None))
    assert 10 < int((found < 0.99 * plain).sum()) < 64  # some are slowed down, some are not


def test_a_part_of_every_head_may_be_turned():
    arch = architecture(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4}))
    found = rotary_frequencies(replace(arch, rotary_fraction=0.5))
    torch.testing.assert_close(found, 1e4 ** (-torch.arange(32) / 32))


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3465735902799727])
def test_megatron_multiplies_cos_and_sin_by_the_factor(
    factor: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    config = SimpleNamespace(apply_rope_fusion=False)
    model = SimpleNamespace(config=config, rotary_pos_emb=SimpleNamespace(inv_freq=None))
    arch = architecture(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4}))
    yarn = replace(arch, rotary_scaling=Yarn(4.0, 512, attention_factor=factor))
    set_rotary(model, yarn)
    found = _yarn_get_concentration_factor_from_config(config)
    assert found == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(model.rotary_pos_emb.inv_freq, rotary_frequencies(yarn))


def test_a_fused_kernel_would_leave_the_factor_out():
    config = SimpleNamespace(apply_rope_fusion=True)
    model = SimpleNamespace(config=config, rotary_pos_emb=SimpleNamespace(inv_freq=None))
    arch = architecture(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        set_rotary(model, arch)
        with pytest.raises(ValueError, match="apply_rope_fusion: the fused kernel leaves out"):
            set_rotary(model, replace(arch, rotary_scaling=Yarn(4.0, 512)))
