"""gpt-oss (20b, 120b): attention sinks, windows in every other layer, biases, its own activation.

Read against ``transformers/models/gpt_oss`` and https://arxiv.org/abs/2508.10925.
"""

from dataclasses import replace
from typing import Any

from rltrain.weights.architecture.config_json import Fields, decoder, experts
from rltrain.weights.architecture.decoder import Architecture, Llama3Rotary, Yarn
from rltrain.weights.families.family import Family
from rltrain.weights.mapping.parameters import FamilyRules, TensorTemplate, WeightRule
from rltrain.weights.mapping.rules import HF_LAYER, MEGATRON_LAYER, ModuleNames, usual_rules
from rltrain.weights.mapping.stacked_experts import StackedSlice

_LIMIT = 7.0


def _read(fields: Fields) -> dict[str, Any]:
    fields.required("rope_scaling", "rope_parameters")  # transformers' default is a YaRN
    fields.required("head_dim")  # and 64 whatever the other sizes
    shared = decoder(fields)
    _no_factor_of_its_own(fields, shared["rotary_scaling"])
    routed = experts(fields, "num_local_experts", "num_experts")
    fields.only("experts_per_token", routed["experts_per_token"])
    fields.ignore("initial_context_length")  # the rotary embedding has it once more
    fields.only("attention_bias", True)
    fields.only("swiglu_alpha", 1.702)  # vLLM has this built in, and the next two; transformers not
    fields.only("swiglu_limit", _LIMIT)
    return {
        **shared,
        **routed,
        "expert_size": shared["ffn_size"],
        "norm_topk_prob": True,
        "moe_layers": tuple(range(shared["num_layers"])),
        "linear_bias": True,
        "swiglu_limit": _LIMIT,
        "attention_sinks": True,
        **_windows(fields, shared["num_layers"]),
    }


def _no_factor_of_its_own(fields: Fields, scaling: Llama3Rotary | Yarn | None) -> None:
    """vLLM works the factor of YaRN out from the scaling alone."""
    if isinstance(scaling, Yarn) and (scaling.attention_factor, scaling.mscale) != (None, None):
        raise ValueError(
            f"{fields.where}: attention_factor={scaling.attention_factor} and "
            f"mscale={scaling.mscale} of the rotary scaling are not supported, only none"
            " [RL3002]"
        )


def _windows(fields: Fields, num_layers: int) -> dict[str, Any]:
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    fields.only("layer_types", kinds)
    return {
        "window": fields.size("sliding_window"),
        "windowed_layers": tuple(range(0, num_layers, 2)),
    }


# Gate and up of an expert alternate, and matrices lie transposed. No checkpoint names an expert
# alone: the names below only say which one is meant.
_ONE = HF_LAYER + "mlp.experts.{expert}."
_ALL = HF_LAYER + "mlp.experts."
_GATE_AND_UP = (("gate_proj", (0, 2)), ("up_proj", (1, 2)))


def _gate_up(kind: str, columns: str, name: str, *, transposed: bool) -> WeightRule:
    parts = (
        TensorTemplate(
            f"{_ONE}{one}.{kind}",
            "expert" + columns,
            StackedSlice(_ALL + name, part, interleaved=True, transposed=transposed, only=True),
        )
        for one, part in _GATE_AND_UP
    )
    return WeightRule(
        f"{MEGATRON_LAYER}mlp.experts.linear_fc1.{kind}{{expert}}", tuple(parts), cut=0
    )


def _down(kind: str, columns: str, name: str, *, cut: int | None, transposed: bool) -> WeightRule:
    place = StackedSlice(_ALL + name, transposed=transposed, only=True)
    part = TensorTemplate(f"{_ONE}down_proj.{kind}", "hidden" + columns, place)
    return WeightRule(f"{MEGATRON_LAYER}mlp.experts.linear_fc2.{kind}{{expert}}", (part,), cut=cut)


_EXPERT = (
    _gate_up("weight", " hidden", "gate_up_proj", transposed=True),
    _gate_up("bias", "", "gate_up_proj_bias", transposed=False),
    _down("weight", " expert", "down_proj", cut=1, transposed=True),
    _down("bias", "", "down_proj_bias", cut=None, transposed=False),
)


def _rules(arch: Architecture) -> FamilyRules:
    return replace(usual_rules(arch, ModuleNames(router="router")), expert=_EXPERT)


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), _read, _rules)
