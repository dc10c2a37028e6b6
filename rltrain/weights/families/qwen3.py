"""Qwen3 and Qwen3-MoE: queries and keys are normed head by head."""

from typing import Any

from rltrain.weights.architecture.config_json import (
    Fields,
    decoder,
    every_nth_layer,
    experts,
    no_sliding_window,
    normalized,
)
from rltrain.weights.families.family import Family


def _dense(fields: Fields) -> dict[str, Any]:
    no_sliding_window(fields)
    fields.required("head_dim")  # transformers' default is 128 whatever the other sizes
    return {**decoder(fields), "qk_norm": "heads"}


def sparse_decoder(fields: Fields) -> dict[str, Any]:
    """What Qwen2-MoE and Qwen3-MoE have in common."""
    no_sliding_window(fields)
    shared = decoder(fields)
    routed = experts(fields, "num_experts", "num_local_experts")
    return {
        **shared,
        **routed,
        "expert_size": fields.size("moe_intermediate_size"),
        "norm_topk_prob": normalized(fields, routed["experts_per_token"]),
        "moe_layers": every_nth_layer(fields, shared["num_layers"]),
    }


def _moe(fields: Fields) -> dict[str, Any]:
    return {**sparse_decoder(fields), "qk_norm": "heads"}


QWEN3 = Family("qwen3", ("Qwen3ForCausalLM",), _dense)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _moe)
