"""GLM-4.5-MoE (Air, 4.5, 4.6): DeepSeek-V3's experts behind grouped-query attention."""

from typing import Any

from rltrain.weights.architecture.config_json import Fields, decoder
from rltrain.weights.families.deepseek import biased_experts, mtp
from rltrain.weights.families.family import Family


def _moe(fields: Fields) -> dict[str, Any]:
    # transformers' default is one half of a head, not the whole.
    if "partial_rotary_factor" not in {**fields.config, **fields.get("rope_parameters", {})}:
        fields.required("partial_rotary_factor")
    return {
        **decoder(fields, partial_rotary=True),
        **biased_experts(fields),
        **mtp(fields),
        "qkv_bias": fields.flag("attention_bias", default=False),
        "qk_norm": "heads" if fields.flag("use_qk_norm", default=False) else "none",
    }


GLM4_MOE = Family("glm4_moe", ("Glm4MoeForCausalLM",), _moe)
