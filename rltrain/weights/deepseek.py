"""DeepSeek-V3 and models that route as it does: where Megatron's parameters lie in a checkpoint.

Embedding, dense layers, experts and head are named as Qwen3's.
"""

from dataclasses import replace

from rltrain.weights.architecture import Architecture
from rltrain.weights.mapping import Layout, Part, Rule
from rltrain.weights.qwen3 import ATTENTION, QK_NORM, QWEN3

_HF = "model.layers.{layer}."
_SHARED = _HF + "mlp.shared_experts."
_MEGATRON = "decoder.layers.{layer}."
_MTP = "mtp.layers.{depth}."


def deepseek_v3(arch: Architecture) -> Layout:
    """Its rules depend on the architecture: latent attention, expert bias and shared expert."""
    attention = _latent_attention(arch) if arch.mla else ATTENTION + QK_NORM * arch.qk_norm
    moe = (
        *QWEN3.moe,
        *(_EXPERT_BIAS * arch.expert_bias),
        *(_SHARED_EXPERT * (arch.shared_expert_size > 0)),
    )
    ends_with_moe = arch.num_layers - 1 in arch.moe_layers
    return replace(
        QWEN3,
        attention=attention,
        moe=moe,
        # Megatron builds these layers like the last one of the decoder.
        mtp=_MTP_ONLY + _in_mtp(attention + (moe if ends_with_moe else QWEN3.dense)),
        mtp_expert=_in_mtp(QWEN3.expert) if ends_with_moe else (),
    )


_EXPERT_BIAS = (
    Rule(
        _MEGATRON + "mlp.router.expert_bias",
        (Part(_HF + "mlp.gate.e_score_correction_bias", "experts"),),
        kind="buffer",
    ),
)
_SHARED_EXPERT = (
    Rule(
        _MEGATRON + "mlp.shared_experts.linear_fc1.weight",
        (
            Part(_SHARED + "gate_proj.weight", "shared hidden"),
            Part(_SHARED + "up_proj.weight", "shared hidden"),
        ),
        cut=0,
    ),
    Rule(
        _MEGATRON + "mlp.shared_experts.linear_fc2.weight",
        (Part(_SHARED + "down_proj.weight", "hidden shared"),),
        cut=1,
    ),
)


def _latent_attention(arch: Architecture) -> tuple[Rule, ...]:
    def rule(megatron: str, name: str, shape: str, cut: int | None = None) -> Rule:
        return Rule(_MEGATRON + megatron, (Part(_HF + name, shape),), cut=cut)

    def attention(megatron: str, name: str, shape: str, cut: int | None = None) -> Rule:
        return rule("self_attention." + megatron, f"self_attn.{name}.weight", shape, cut)

    assert arch.mla is not None
    if arch.mla.q_lora_rank is None:
        queries: tuple[Rule, ...] = (attention("linear_q_proj.weight", "q_proj", "q hidden", 0),)
    else:
        queries = (
            attention("linear_q_down_proj.weight", "q_a_proj", "q_latent hidden"),
            attention("linear_q_up_proj.layer_norm_weight", "q_a_layernorm", "q_latent"),
            attention("linear_q_up_proj.weight", "q_b_proj", "q q_latent", 0),
        )
    return (
        rule("input_layernorm.weight", "input_layernorm.weight", "hidden"),
        *queries,
        attention("linear_kv_down_proj.weight", "kv_a_proj_with_mqa", "kv_latent_and_rope hidden"),
        attention("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm", "kv_latent"),
        attention("linear_kv_up_proj.weight", "kv_b_proj", "k_nope_and_v kv_latent", 0),
        attention("linear_proj.weight", "o_proj", "hidden v", 1),
    )


_MTP_ONLY = (
    Rule(_MTP + "enorm.weight", (Part(_HF + "enorm.weight", "hidden"),), kind="frozen"),
    Rule(_MTP + "hnorm.weight", (Part(_HF + "hnorm.weight", "hidden"),), kind="frozen"),
    Rule(
        _MTP + "eh_proj.weight",
        (Part(_HF + "eh_proj.weight", "hidden twice_hidden"),),
        cut=0,
        kind="frozen",
    ),
    Rule(
        _MTP + "final_layernorm.weight",
        (Part(_HF + "shared_head.norm.weight", "hidden"),),
        kind="frozen",
    ),
)


def _in_mtp(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a decoder layer, for the one inside an MTP layer."""
    return tuple(
        replace(
            rule,
            megatron=rule.megatron.replace(_MEGATRON, _MTP + "transformer_layer."),
            kind="frozen" if rule.kind == "trained" else rule.kind,
        )
        for rule in rules
    )
