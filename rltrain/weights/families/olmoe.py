"""OLMoE: queries and keys are normed over all heads together."""

from typing import Any

from rltrain.weights.architecture.config_json import (
    Fields,
    decoder,
    experts,
    heads_share_the_hidden_size,
)
from rltrain.weights.families.family import Family


def _read(fields: Fields) -> dict[str, Any]:
    shared = decoder(fields, default_kv_heads=True, default_theta=1e4)
    heads_share_the_hidden_size(fields)
    fields.only("clip_qkv", None)
    # vLLM reads none of these and has the values of the released models.
    fields.only("norm_topk_prob", False)
    fields.only("rms_norm_eps", 1e-5)
    fields.only("tie_word_embeddings", False)
    return {
        **shared,
        **experts(fields, "num_experts", "num_local_experts"),
        "qk_norm": "all",
        "expert_size": shared["ffn_size"],
        "moe_layers": tuple(range(shared["num_layers"])),
    }


OLMOE = Family("olmoe", ("OlmoeForCausalLM",), _read)
