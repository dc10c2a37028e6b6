"""DeepSeek-V2 and V3, and what is built like V3: Moonlight, Kimi-K2.

A token's experts come from its best groups. Every expert of another group is out, whatever its
score: so do DeepSeek's own inference code, vLLM, Megatron and transformers since 5. The code
published beside the first checkpoints, and transformers 4, gave those experts the score 0 instead,
which beats a chosen group's expert whose biased score is negative.
"""

from typing import Any

from rltrain.weights.architecture.config_json import (
    Fields,
    decoder,
    experts,
    from_layer,
    normalized,
)
from rltrain.weights.architecture.decoder import MLA
from rltrain.weights.families.family import Family
from rltrain.weights.mapping.mtp import MTP_FIELDS


def _v2(fields: Fields) -> dict[str, Any]:
    fields.only("scoring_func", "softmax")
    # transformers reads past it, vLLM normalizes, DeepSeek's own code then leaves out the scaling.
    fields.only("norm_topk_prob", False)
    fields.only("topk_method", "greedy", "group_limited_greedy")
    if fields.get("topk_method", "greedy") == "greedy":
        fields.only("n_group", 1)  # vLLM limits the choice to groups all the same
    return {**_latent_decoder(fields), **_experts(fields), "norm_topk_prob": False}


def _v3(fields: Fields) -> dict[str, Any]:
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.get(name) != value:
            raise ValueError(
                f"{fields.where}: {name}={fields.get(name)!r} is not supported for a DeepSeek-V3, "
                f"only {value!r}. It must be there: transformers 5 leaves it out and means "
                f"{value!r}, and vLLM takes a model without it for another one"
                " [RL3002]"
            )
    # False would be the two halves of a head, not its pairs, and Megatron turns pairs.
    fields.only("rope_interleave", True)
    return {**_latent_decoder(fields), **biased_experts(fields), **mtp(fields)}


def biased_experts(fields: Fields) -> dict[str, Any]:
    """Sigmoid scores and a bias for the choice, as DeepSeek-V3 has them."""
    settings = _experts(fields)
    return {
        **settings,
        "norm_topk_prob": normalized(fields, settings["experts_per_token"]),
        "score_function": "sigmoid",
        "expert_bias": True,
    }


def mtp(fields: Fields) -> dict[str, Any]:
    return {"mtp_layers": fields.count(*MTP_FIELDS)}


def _experts(fields: Fields) -> dict[str, Any]:
    fields.only("moe_layer_freq", 1)
    fields.ignore("aux_loss_alpha", "seq_aux", "ep_size")
    size = fields.size("moe_intermediate_size")
    return {
        **experts(fields, "n_routed_experts", "num_experts", "num_local_experts"),
        "expert_size": size,
        "shared_expert_size": fields.count("n_shared_experts") * size,
        "num_groups": fields.size("n_group", default=1),
        "groups_per_token": fields.size("topk_group", default=1),
        "routed_scaling": float(fields.get("routed_scaling_factor", 1.0)),
        "moe_layers": from_layer(fields, "first_k_dense_replace"),
    }


def _latent_decoder(fields: Fields) -> dict[str, Any]:
    latent = MLA(
        q_lora_rank=fields.get("q_lora_rank"),
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
    )
    settings = decoder(fields, default_kv_heads=True)
    # transformers writes what follows from the others.
    fields.only("head_dim", latent.qk_rope_head_dim)
    fields.only("qk_head_dim", latent.qk_head_dim)
    return {**settings, "head_dim": latent.qk_head_dim, "mla": latent}


DEEPSEEK_V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), _v2)
DEEPSEEK_V3 = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), _v3)
