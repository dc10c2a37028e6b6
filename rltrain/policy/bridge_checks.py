"""Whether a model of Megatron-Bridge's is one that rltrain can train (see `bridge`)."""

from dataclasses import fields
from functools import partial
from typing import Any

from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from rltrain.weights.architecture import Architecture

_TORCH_READS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "window_size": None,
    "softmax_type": "vanilla",
    "apply_query_key_layer_scaling": False,
    "add_bias_linear": False,
    "experimental_attention_variant": None,
}
"""Settings under which the torch backend computes what Transformer Engine does."""


def check_sizes(provider: Any, arch: Architecture) -> None:
    """What config.json was read to say, and what Megatron-Bridge reads in it.

    Raises:
        ValueError: they differ, so routes or layouts would be planned for another model.
    """
    pairs = {
        "layers": (arch.num_layers, provider.num_layers),
        "attention heads": (arch.num_heads, provider.num_attention_heads),
        "vocabulary": (arch.vocab_size, provider.vocab_size),
        "experts": (arch.num_experts, provider.num_moe_experts or 0),
    }
    if arch.num_experts:
        pairs["experts per token"] = (arch.experts_per_token, provider.moe_router_topk)
    wrong = [f"{name} {own}, {other}" for name, (own, other) in pairs.items() if own != other]
    if wrong:
        raise ValueError(
            "config.json was read differently by rltrain and megatron-bridge: " + "; ".join(wrong)
        )


def check_torch(provider: Any, path: str) -> None:
    """Whether the torch backend can stand for Transformer Engine in this family's layers.

    Raises:
        ValueError: the family has layers of its own, or settings that only Transformer Engine
            reads.
    """
    spec = provider.transformer_layer_spec
    usual = spec is default_layer_spec or (
        isinstance(spec, partial) and spec.func is get_gpt_decoder_block_spec
    )
    problems = [
        f"{name}={getattr(provider, name)!r}"
        for name, value in _TORCH_READS.items()
        if getattr(provider, name, value) != value
    ]
    if not usual or type(provider).provide is not GPTModelProvider.provide:
        problems.append("layers of its own")
    if problems:
        raise ValueError(
            f"{path}: megatron-bridge builds this family with {', '.join(problems)}, which needs "
            "Transformer Engine: train it on a GPU with policy.transformer_engine=auto"
        )


def family_fields(provider: Any) -> set[str]:
    """The fields of Megatron's configuration in which the family differs from the default."""
    plain = {field.name: field.default for field in fields(TransformerConfig)}
    return {name for name, value in plain.items() if getattr(provider, name) != value}
