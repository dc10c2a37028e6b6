"""DeepSeek-V3, and what is built like it (Moonlight, Kimi-K2)."""

from typing import Any

from rltrain.weights.config_json import Fields, decoder, experts, normalized
from rltrain.weights.families.family import Family


def _v3(fields: Fields) -> dict[str, Any]:
    shared = decoder(fields)
    routed = experts(fields, "n_routed_experts", "num_local_experts")
    return {
        **shared,
        **routed,
        "norm_topk_prob": normalized(fields, routed["experts_per_token"]),
    }


DEEPSEEK_V3 = Family("deepseek_v3", (), _v3)
