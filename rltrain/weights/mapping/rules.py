"""The rules that families share: Megatron's parameters and the usual Hugging Face names.

Megatron's names are those of the Transformer Engine layers, which the torch backend shares.
"""

from dataclasses import dataclass, replace

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.mapping.parameters import FamilyRules, TensorTemplate, WeightRule
from rltrain.weights.mapping.stacked_experts import StackedSlice

HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."
_MTP = "mtp.layers.{depth}."
_NORM_BEFORE_MLP = TensorTemplate(HF_LAYER + "post_attention_layernorm.weight", "hidden")


@dataclass(frozen=True)
class ModuleNames:
    """A family's names for the modules of a layer with a router."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    """One of an expert's three matrices, like the next two."""
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


def usual_rules(arch: Architecture, names: ModuleNames = ModuleNames()) -> FamilyRules:
    """The rules of a decoder with the parts of ``arch``, MTP layers included."""
    attention = _latent_attention(arch) if arch.mla else _attention(arch)
    moe, expert = _moe(arch, names), _expert(names)
    ends_with_moe = arch.num_layers - 1 in arch.moe_layers
    has_mtp = arch.mtp_layers > 0
    # Megatron builds MTP layers like the last one of the decoder.
    inner = attention + (moe if ends_with_moe else DENSE)
    return FamilyRules(
        first=(EMBEDDING,),
        attention=attention,
        dense=DENSE,
        moe=moe,
        expert=expert,
        last=(FINAL_NORM, OUTPUT),
        mtp=_MTP_ONLY + _in_mtp(inner) if has_mtp else (),
        mtp_expert=_in_mtp(expert) if has_mtp and ends_with_moe else (),
    )


EMBEDDING = WeightRule(
    "embedding.word_embeddings.weight",
    (TensorTemplate("model.embed_tokens.weight", "vocab hidden"),),
    cut=0,
    padded=True,
)
FINAL_NORM = WeightRule(
    "decoder.final_layernorm.weight", (TensorTemplate("model.norm.weight", "hidden"),)
)
OUTPUT = WeightRule(
    "output_layer.weight", (TensorTemplate("lm_head.weight", "vocab hidden"),), cut=0, padded=True
)
DENSE = (
    WeightRule(MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight", (_NORM_BEFORE_MLP,)),
    WeightRule(
        MEGATRON_LAYER + "mlp.linear_fc1.weight",
        (
            TensorTemplate(HF_LAYER + "mlp.gate_proj.weight", "ffn hidden"),
            TensorTemplate(HF_LAYER + "mlp.up_proj.weight", "ffn hidden"),
        ),
        cut=0,
    ),
    WeightRule(
        MEGATRON_LAYER + "mlp.linear_fc2.weight",
        (TensorTemplate(HF_LAYER + "mlp.down_proj.weight", "hidden ffn"),),
        cut=1,
    ),
)


def _attention(arch: Architecture) -> tuple[WeightRule, ...]:
    def rule(megatron: str, name: str, shape: str, cut: int | None = None) -> WeightRule:
        part = TensorTemplate(HF_LAYER + name, shape)
        return WeightRule(MEGATRON_LAYER + "self_attention." + megatron, (part,), cut=cut)

    def qkv(kind: str, inner: str) -> WeightRule:
        projections = [("q", "q"), ("k", "kv"), ("v", "kv")]
        return WeightRule(
            MEGATRON_LAYER + f"self_attention.linear_qkv.{kind}",
            tuple(
                TensorTemplate(HF_LAYER + f"self_attn.{n}_proj.{kind}", rows + inner)
                for n, rows in projections
            ),
            join="qkv",
            cut=0,
        )

    rules = [
        rule("linear_qkv.layer_norm_weight", "input_layernorm.weight", "hidden"),
        qkv("weight", " hidden"),
        rule("linear_proj.weight", "self_attn.o_proj.weight", "hidden q", 1),
    ]
    if arch.qkv_bias or arch.linear_bias:
        rules.insert(2, qkv("bias", ""))
    if arch.linear_bias:
        rules.append(rule("linear_proj.bias", "self_attn.o_proj.bias", "hidden"))
    if arch.attention_sinks:
        rules.append(rule("core_attention.softmax_offset", "self_attn.sinks", "heads", 0))
    if arch.qk_norm == "heads":
        rules += [
            rule("q_layernorm.weight", "self_attn.q_norm.weight", "head"),
            rule("k_layernorm.weight", "self_attn.k_norm.weight", "head"),
        ]
    if arch.qk_norm == "all":
        rules += [
            rule("q_layernorm.weight", "self_attn.q_norm.weight", "q", 0),
            rule("k_layernorm.weight", "self_attn.k_norm.weight", "kv", 0),
        ]
    return tuple(rules)


def _latent_attention(arch: Architecture) -> tuple[WeightRule, ...]:
    def rule(megatron: str, name: str, shape: str, cut: int | None = None) -> WeightRule:
        return WeightRule(
            MEGATRON_LAYER + megatron, (TensorTemplate(HF_LAYER + name, shape),), cut=cut
        )

    def attention(megatron: str, name: str, shape: str, cut: int | None = None) -> WeightRule:
        return rule("self_attention." + megatron, f"self_attn.{name}.weight", shape, cut)

    assert arch.mla is not None
    if arch.mla.q_lora_rank is None:
        queries: tuple[WeightRule, ...] = (
            attention("linear_q_proj.weight", "q_proj", "q hidden", 0),
        )
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


def _moe(arch: Architecture, names: ModuleNames) -> tuple[WeightRule, ...]:
    block = HF_LAYER + names.block + "."
    router = TensorTemplate(block + names.router + ".weight", "experts hidden")
    rules = [
        WeightRule(MEGATRON_LAYER + "pre_mlp_layernorm.weight", (_NORM_BEFORE_MLP,)),
        WeightRule(MEGATRON_LAYER + "mlp.router.weight", (router,)),
    ]
    if arch.linear_bias:
        offset = TensorTemplate(block + names.router + ".bias", "experts")
        rules.append(WeightRule(MEGATRON_LAYER + "mlp.router.bias", (offset,)))
    if arch.expert_bias:
        bias = TensorTemplate(block + names.router + ".e_score_correction_bias", "experts")
        rules.append(WeightRule(MEGATRON_LAYER + "mlp.router.expert_bias", (bias,), kind="buffer"))
    if arch.shared_expert_size > 0:
        shared = block + names.shared + "."
        rules += [
            WeightRule(
                MEGATRON_LAYER + "mlp.shared_experts.linear_fc1.weight",
                (
                    TensorTemplate(shared + "gate_proj.weight", "shared hidden"),
                    TensorTemplate(shared + "up_proj.weight", "shared hidden"),
                ),
                cut=0,
            ),
            WeightRule(
                MEGATRON_LAYER + "mlp.shared_experts.linear_fc2.weight",
                (TensorTemplate(shared + "down_proj.weight", "hidden shared"),),
                cut=1,
            ),
        ]
    if arch.shared_expert_gate:
        gate = TensorTemplate(block + names.shared + "_gate.weight", "one hidden")
        rules.append(WeightRule(MEGATRON_LAYER + "mlp.shared_experts.gate_weight", (gate,)))
    return tuple(rules)


def _expert(names: ModuleNames) -> tuple[WeightRule, ...]:
    # A tensor of all experts of a layer has the same name in every family.
    stacked = HF_LAYER + "mlp.experts."
    one = HF_LAYER + names.block + ".experts.{expert}."
    gate_up = [(names.gate, (0, 2)), (names.up, (1, 2))]
    return (
        WeightRule(
            MEGATRON_LAYER + "mlp.experts.linear_fc1.weight{expert}",
            tuple(
                TensorTemplate(
                    one + name + ".weight",
                    "expert hidden",
                    StackedSlice(stacked + "gate_up_proj", part),
                )
                for name, part in gate_up
            ),
            cut=0,
        ),
        WeightRule(
            MEGATRON_LAYER + "mlp.experts.linear_fc2.weight{expert}",
            (
                TensorTemplate(
                    one + names.down + ".weight",
                    "hidden expert",
                    StackedSlice(stacked + "down_proj"),
                ),
            ),
            cut=1,
        ),
    )


_MTP_ONLY = (
    WeightRule(
        _MTP + "enorm.weight", (TensorTemplate(HF_LAYER + "enorm.weight", "hidden"),), kind="frozen"
    ),
    WeightRule(
        _MTP + "hnorm.weight", (TensorTemplate(HF_LAYER + "hnorm.weight", "hidden"),), kind="frozen"
    ),
    WeightRule(
        _MTP + "eh_proj.weight",
        (TensorTemplate(HF_LAYER + "eh_proj.weight", "hidden twice_hidden"),),
        cut=0,
        kind="frozen",
    ),
    WeightRule(
        _MTP + "final_layernorm.weight",
        (TensorTemplate(HF_LAYER + "shared_head.norm.weight", "hidden"),),
        kind="frozen",
    ),
)


def _in_mtp(rules: tuple[WeightRule, ...]) -> tuple[WeightRule, ...]:
    """The rules of a decoder layer, for the decoder layer inside an MTP layer."""
    return tuple(
        replace(
            rule,
            megatron=rule.megatron.replace(MEGATRON_LAYER, _MTP + "transformer_layer."),
            kind="frozen" if rule.kind == "trained" else rule.kind,
        )
        for rule in rules
    )
