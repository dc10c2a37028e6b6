"""OLMoE: queries and keys are normed over all heads together."""

from typing import Any

from rltrain.weights.config_json import Fields, decoder, experts, normalized
from rltrain.weights.families.family import Family


def _read(fields: Fields) -> dict[str, Any]:
    shared = decoder(fields, default_kv_heads=True)
    routed = experts(fields, "num_experts", "num_local_experts")
    fields.only("clip_qkv")
    return {
        **shared,
        **routed,
        "qk_norm": "all",
        "expert_size": shared["ffn_size"],
        "norm_topk_prob": normalized(fields, routed["experts_per_token"]),
        "moe_layers": tuple(range(shared["num_layers"])),
    }


OLMOE = Family("olmoe", ("OlmoeForCausalLM",), _read)
