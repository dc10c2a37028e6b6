"""Rotary frequencies against those of transformers."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rltrain.policy.rotary import rotary_frequencies
from rltrain.weights.architecture import Architecture
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
    assert factor == 1.0
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    plain = rotary_frequencies(replace(architecture(config), rotary_scaling=None))
    assert 10 < int((found < 0.99 * plain).sum()) < 64  # some are slowed down, some are not


def test_a_part_of_every_head_may_be_turned():
    arch = architecture(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4}))
    found = rotary_frequencies(replace(arch, rotary_fraction=0.5))
    torch.testing.assert_close(found, 1e4 ** (-torch.arange(32) / 32))
