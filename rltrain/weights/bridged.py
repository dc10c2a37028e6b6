"""Families that rltrain does not map: what ``config.json`` says of them, for Megatron-Bridge.

Only what routing, layouts and the engine must know is read here, under the names that most
families use. How the model computes, Megatron-Bridge reads (`rltrain.policy.bridge`), and whether
the two agree on the sizes is checked there.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

from rltrain.weights.architecture import Architecture
from rltrain.weights.config_json import Fields

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LONGEST = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


def is_installed() -> bool:
    """Whether the package is there; it is not imported, since that takes torch and long."""
    return importlib.util.find_spec("megatron.bridge") is not None


def remedy(asked: bool) -> str:
    """What may help with a family that is not mapped."""
    if is_installed():
        return "model.bridge=true lets megatron-bridge, which is installed, try it"
    way = "for model.bridge=true" if asked else "and set model.bridge=true to have it tried"
    return f"Install megatron-bridge {way} (docs/bridge.md says where it can be)"


def bridged_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Sizes of a decoder-only model; ``where`` stands in the errors.

    Raises:
        ValueError: a size is missing, or stands in a part of the configuration, as in models that
            also see or hear.
    """
    if "text_config" in config:
        raise ValueError(f"{where}: text_config: models of more than text are not supported")
    fields = Fields(config, where)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    layers = fields.size("num_hidden_layers")
    routed = any(fields.get(name) for name in _COUNTS)
    return Architecture(
        family="bridged",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", default=heads),
        head_dim=fields.size("head_dim", default=hidden // heads),
        ffn_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        rope_theta=float(fields.get("rope_theta", 10000.0)),
        norm_eps=float(fields.get("rms_norm_eps", 1e-5)),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_positions=_positions(fields),
        num_experts=fields.size(*_COUNTS) if routed else 0,
        experts_per_token=fields.size("num_experts_per_tok", "moe_topk") if routed else 0,
        expert_size=fields.size("moe_intermediate_size", "intermediate_size") if routed else 0,
        moe_layers=_moe_layers(fields, layers) if routed else (),
    )


def _positions(fields: Fields) -> int:
    """The smallest of what names the longest sequence, as vLLM takes it
    (``derive_max_model_len_and_key``)."""
    found = [fields.size(name) for name in _LONGEST if fields.get(name) is not None]
    if not found:
        raise ValueError(f"{fields.where}: field {' or '.join(_LONGEST)} is missing")
    return min(found)


def _moe_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers with a router, by the three ways of saying so that transformers' families have."""
    first = fields.count("first_k_dense_replace")
    dense = fields.get("mlp_only_layers", [])
    step = fields.size("decoder_sparse_step", default=1)
    return tuple(n for n in range(first, num_layers) if n not in dense and (n + 1) % step == 0)
