"""The rules that families share: Megatron's parameters and the usual Hugging Face names.

Megatron's names are those of the Transformer Engine layers, which the torch backend shares.
"""

from dataclasses import dataclass, replace

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.parameters import Layout, Part, Rule
from rltrain.weights.mapping.stacked_experts import Stacked

HF = "model.layers.{layer}."
MEGATRON = "decoder.layers.{layer}."
_MTP = "mtp.layers.{depth}."
_NORM_BEFORE_MLP = Part(HF + "post_attention_layernorm.weight", "hidden")


@dataclass(frozen=True)
class Names:
    """What a family calls the parts of a layer that has a router."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    """Of an expert's three matrices, as are the next two."""
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


def usual_layout(arch: Architecture, names: Names = Names()) -> Layout:
    """The layout of a decoder whose parts ``arch`` tells, MTP layers included."""
    attention = _latent_attention(arch) if arch.mla else _attention(arch)
    moe, expert = _moe(arch, names), _expert(names)
    ends_with_moe = arch.num_layers - 1 in arch.moe_layers
    has_mtp = arch.mtp_layers > 0
    # Megatron builds MTP layers like the last one of the decoder.
    inner = attention + (moe if ends_with_moe else DENSE)
    return Layout(
        first=(EMBEDDING,),
        attention=attention,
        dense=DENSE,
        moe=moe,
        expert=expert,
        last=(FINAL_NORM, OUTPUT),
        mtp=_MTP_ONLY + _in_mtp(inner) if has_mtp else (),
        mtp_expert=_in_mtp(expert) if has_mtp and ends_with_moe else (),
    )


EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    (Part("model.embed_tokens.weight", "vocab hidden"),),
    cut=0,
    padded=True,
)
FINAL_NORM = Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", "hidden"),))
OUTPUT = Rule("output_layer.weight", (Part("lm_head.weight", "vocab hidden"),), cut=0, padded=True)
DENSE = (
    Rule(MEGATRON + "mlp.linear_fc1.layer_norm_weight", (_NORM_BEFORE_MLP,)),
    Rule(
        MEGATRON + "mlp.linear_fc1.weight",
        (
            Part(HF + "mlp.gate_proj.weight", "ffn hidden"),
            Part(HF + "mlp.up_proj.weight", "ffn hidden"),
        ),
        cut=0,
    ),
    Rule(
        MEGATRON + "mlp.linear_fc2.weight",
        (Part(HF + "mlp.down_proj.weight", "hidden ffn"),),
        cut=1,
    ),
)


def _attention(arch: Architecture) -> tuple[Rule, ...]:
    def rule(megatron: str, name: str, shape: str, cut: int | None = None) -> Rule:
        part = Part(HF + name, shape)
        return Rule(MEGATRON + "self_attention." + megatron, (part,), cut=cut)

    def qkv(kind: str, inner: str) -> Rule:
        parts = [("q", "q"), ("k", "kv"), ("v", "kv")]
        return Rule(
            MEGATRON + f"self_attention.linear_qkv.{kind}",
            tuple(Part(HF + f"self_attn.{n}_proj.{kind}", rows + inner) for n, rows in parts),
            join="qkv",
            cut=0,
        )

    found = [
        rule("linear_qkv.layer_norm_weight", "input_layernorm.weight", "hidden"),
        qkv("weight", " hidden"),
        rule("linear_proj.weight", "self_attn.o_proj.weight", "hidden q", 1),
    ]
    if arch.qkv_bias or arch.linear_bias:
        found.insert(2, qkv("bias", ""))
    if arch.linear_bias:
        found.append(rule("linear_proj.bias", "self_attn.o_proj.bias", "hidden"))
    if arch.attention_sinks:
        found.append(rule("core_attention.softmax_offset", "self_attn.sinks", "heads", 0))
    if arch.qk_norm == "heads":
        found += [
            rule("q_layernorm.weight", "self_attn.q_norm.weight", "head"),
            rule("k_layernorm.weight", "self_attn.k_norm.weight", "head"),
        ]
    if arch.qk_norm == "all":
        found += [
            rule("q_layernorm.weight", "self_attn.q_norm.weight", "q", 0),
            rule("k_layernorm.weight", "self_attn.k_norm.weight", "kv", 0),
        ]
    return tuple(found)


def _latent_attention(arch: Architecture) -> tuple[Rule, ...]:
    def rule(megatron: str, name: str, shape: str, cut: int | None = None) -> Rule:
        return Rule(MEGATRON + megatron, (Part(HF + name, shape),), cut=cut)

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


def _moe(arch: Architecture, names: Names) -> tuple[Rule, ...]:
    block = HF + names.block + "."
    router = Part(block + names.router + ".weight", "experts hidden")
    found = [
        Rule(MEGATRON + "pre_mlp_layernorm.weight", (_NORM_BEFORE_MLP,)),
        Rule(MEGATRON + "mlp.router.weight", (router,)),
    ]
    if arch.linear_bias:
        offset = Part(block + names.router + ".bias", "experts")
        found.append(Rule(MEGATRON + "mlp.router.bias", (offset,)))
    if arch.expert_bias:
        bias = Part(block + names.router + ".e_score_correction_bias", "experts")
        found.append(Rule(MEGATRON + "mlp.router.expert_bias", (bias,), kind="buffer"))
    if arch.shared_expert_size > 0:
        shared = block + names.shared + "."
        found += [
            Rule(
                MEGATRON + "mlp.shared_experts.linear_fc1.weight",
                (
                    Part(shared + "gate_proj.weight", "shared hidden"),
                    Part(shared + "up_proj.weight", "shared hidden"),
                ),
                cut=0,
            ),
            Rule(
                MEGATRON + "mlp.shared_experts.linear_fc2.weight",
                (Part(shared + "down_proj.weight", "hidden shared"),),
                cut=1,
            ),
        ]
    if arch.shared_expert_gate:
        gate = Part(block + names.shared + "_gate.weight", "one hidden")
        found.append(Rule(MEGATRON + "mlp.shared_experts.gate_weight", (gate,)))
    return tuple(found)


def _expert(names: Names) -> tuple[Rule, ...]:
    # Together, all experts of a layer have the same two names in every family.
    stacked = HF + "mlp.experts."
    one = HF + names.block + ".experts.{expert}."
    gate_up = [(names.gate, (0, 2)), (names.up, (1, 2))]
    return (
        Rule(
            MEGATRON + "mlp.experts.linear_fc1.weight{expert}",
            tuple(
                Part(
                    one + name + ".weight", "expert hidden", Stacked(stacked + "gate_up_proj", part)
                )
                for name, part in gate_up
            ),
            cut=0,
        ),
        Rule(
            MEGATRON + "mlp.experts.linear_fc2.weight{expert}",
            (Part(one + names.down + ".weight", "hidden expert", Stacked(stacked + "down_proj")),),
            cut=1,
        ),
    )


_MTP_ONLY = (
    Rule(_MTP + "enorm.weight", (Part(HF + "enorm.weight", "hidden"),), kind="frozen"),
    Rule(_MTP + "hnorm.weight", (Part(HF + "hnorm.weight", "hidden"),), kind="frozen"),
    Rule(
        _MTP + "eh_proj.weight",
        (Part(HF + "eh_proj.weight", "hidden twice_hidden"),),
        cut=0,
        kind="frozen",
    ),
    Rule(
        _MTP + "final_layernorm.weight",
        (Part(HF + "shared_head.norm.weight", "hidden"),),
        kind="frozen",
    ),
)


def _in_mtp(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules of a decoder layer, for the one inside an MTP layer."""
    return tuple(
        replace(
            rule,
            megatron=rule.megatron.replace(MEGATRON, _MTP + "transformer_layer."),
            kind="frozen" if rule.kind == "trained" else rule.kind,
        )
        for rule in rules
    )
