"""Qwen3 and Qwen3-MoE: where each of Megatron's parameters lies in a Hugging Face checkpoint.

Megatron's names are those of the Transformer Engine layers, which `policy.torch_backend` shares.
"""

from rltrain.weights.mapping import Layout, Part, Rule

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_EXPERT = _HF + "mlp.experts.{expert}."
_GATE_UP = _HF + "mlp.experts.gate_up_proj"
_NORM_BEFORE_MLP = Part(_HF + "post_attention_layernorm.weight", "hidden")

ATTENTION = (
    Rule(
        _MEGATRON + "self_attention.linear_qkv.layer_norm_weight",
        (Part(_HF + "input_layernorm.weight", "hidden"),),
    ),
    Rule(
        _MEGATRON + "self_attention.linear_qkv.weight",
        (
            Part(_HF + "self_attn.q_proj.weight", "q hidden"),
            Part(_HF + "self_attn.k_proj.weight", "kv hidden"),
            Part(_HF + "self_attn.v_proj.weight", "kv hidden"),
        ),
        join="qkv",
        cut=0,
    ),
    Rule(
        _MEGATRON + "self_attention.linear_proj.weight",
        (Part(_HF + "self_attn.o_proj.weight", "hidden q"),),
        cut=1,
    ),
)

QK_NORM = (
    Rule(
        _MEGATRON + "self_attention.q_layernorm.weight",
        (Part(_HF + "self_attn.q_norm.weight", "head"),),
    ),
    Rule(
        _MEGATRON + "self_attention.k_layernorm.weight",
        (Part(_HF + "self_attn.k_norm.weight", "head"),),
    ),
)

QWEN3 = Layout(
    first=(
        Rule(
            "embedding.word_embeddings.weight",
            (Part("model.embed_tokens.weight", "vocab hidden"),),
            cut=0,
            padded=True,
        ),
    ),
    attention=ATTENTION + QK_NORM,
    dense=(
        Rule(_MEGATRON + "mlp.linear_fc1.layer_norm_weight", (_NORM_BEFORE_MLP,)),
        Rule(
            _MEGATRON + "mlp.linear_fc1.weight",
            (
                Part(_HF + "mlp.gate_proj.weight", "ffn hidden"),
                Part(_HF + "mlp.up_proj.weight", "ffn hidden"),
            ),
            cut=0,
        ),
        Rule(
            _MEGATRON + "mlp.linear_fc2.weight",
            (Part(_HF + "mlp.down_proj.weight", "hidden ffn"),),
            cut=1,
        ),
    ),
    moe=(
        Rule(_MEGATRON + "pre_mlp_layernorm.weight", (_NORM_BEFORE_MLP,)),
        Rule(_MEGATRON + "mlp.router.weight", (Part(_HF + "mlp.gate.weight", "experts hidden"),)),
    ),
    expert=(
        Rule(
            _MEGATRON + "mlp.experts.linear_fc1.weight{expert}",
            (
                Part(_EXPERT + "gate_proj.weight", "expert hidden", _GATE_UP, (0, 2)),
                Part(_EXPERT + "up_proj.weight", "expert hidden", _GATE_UP, (1, 2)),
            ),
            cut=0,
        ),
        Rule(
            _MEGATRON + "mlp.experts.linear_fc2.weight{expert}",
            (Part(_EXPERT + "down_proj.weight", "hidden expert", _HF + "mlp.experts.down_proj"),),
            cut=1,
        ),
    ),
    last=(
        Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", "hidden"),)),
        Rule(
            "output_layer.weight",
            (Part("lm_head.weight", "vocab hidden"),),
            cut=0,
            padded=True,
        ),
    ),
)
