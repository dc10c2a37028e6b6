"""Qwen2 (2.5, too) and Qwen2-MoE: biases of queries, keys and values, a gated shared expert."""

from functools import partial
from typing import Any

from rltrain.weights.architecture.config_json import (
    Fields,
    decoder,
    heads_share_the_hidden_size,
    no_sliding_window,
)
from rltrain.weights.families.family import Family
from rltrain.weights.families.qwen3 import sparse_decoder
from rltrain.weights.mapping.rules import ModuleNames, usual_rules


def _dense(fields: Fields) -> dict[str, Any]:
    no_sliding_window(fields)
    heads_share_the_hidden_size(fields)
    fields.only("use_mrope", False)
    return {**decoder(fields), "qkv_bias": True}


def _moe(fields: Fields) -> dict[str, Any]:
    heads_share_the_hidden_size(fields)
    fields.only("qkv_bias", True)  # vLLM does not read it
    return {
        **sparse_decoder(fields),
        "qkv_bias": True,
        "shared_expert_size": fields.size("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), _dense)
QWEN2_MOE = Family(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM",),
    _moe,
    partial(usual_rules, names=ModuleNames(shared="shared_expert")),
)
