"""Reads ``config.json`` and rejects every field that could change the forward pass and is not read.

A field is read by its family's reader, or is listed below as irrelevant, or must have a neutral
value. Any other field is an error that names it: if a setting were ignored here, the policy would
train another model than vLLM runs.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.config.bounded_files import load_json
from rltrain.weights.architecture.decoder import Llama3Rotary, Yarn


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Metadata, generation, initialization, inference only, pre-training only, and what rltrain decides
# itself (no dropout, its own auxiliary losses).
_IRRELEVANT = _names(
    "_name_or_path _commit_hash transformers_version torch_dtype dtype use_cache bos_token_id "
    "eos_token_id pad_token_id initializer_range attention_dropout output_router_logits "
    "router_aux_loss_coef auto_map output_attentions output_hidden_states return_dict "
    "attn_implementation _attn_implementation model_type architectures pretraining_tp is_decoder "
    "chunk_size_feed_forward quantization_config"
)
# A field with one of these values, or an absent field, changes nothing in any family.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
}
_ROTARY_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")


class Fields:
    """A parsed ``config.json`` that remembers which fields were read. Errors name ``where``."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default`` where the field is absent or null."""
        self._read.add(name)
        value = self.config.get(name)
        return default if value is None else value

    def required(self, *names: str) -> Any:
        """The value of the first of ``names`` that is present; they name the same setting."""
        values = [value for name in names if (value := self.get(name)) is not None]
        if not values:
            raise ValueError(f"{self.where}: field {' or '.join(names)} is missing [RL3002]")
        return values[0]

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive whole number."""
        if default is not None and all(self.config.get(name) is None for name in names):
            self.ignore(*names)
            return default
        return self._whole(names[0], self.required(*names), least=1)

    def count(self, *names: str) -> int:
        """A whole number, 0 where it is absent."""
        values = [value for name in names if (value := self.get(name)) is not None]
        return self._whole(names[0], values[0] if values else 0, least=0)

    def _whole(self, name: str, value: Any, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "positive " if least else ""
            raise ValueError(
                f"{self.where}: {name} must be a {kind}whole number, found {value!r} [RL3002]"
            )
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.required(name) if default is None else self.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(
                f"{self.where}: {name} must be true or false, found {value!r} [RL3002]"
            )
        return value

    def only(self, name: str, *values: Any) -> None:
        """The field must have one of ``values``, under which it changes nothing, or be absent."""
        value = self.get(name)
        if name in self.config and value not in (None, *values):
            wanted = " or ".join(repr(v) for v in values)
            raise ValueError(
                f"{self.where}: {name}={value!r} is not supported, only {wanted} [RL3002]"
            )

    def ignore(self, *names: str) -> None:
        """Mark fields that change nothing in this family as read."""
        self._read.update(names)

    def refuse_unread(self, family: str) -> None:
        """Raise for the first field that was not read and is not neutral; call it last."""
        self._refuse_layer_types()
        for name in sorted(self.config.keys() - self._read - _IRRELEVANT):
            if name not in _NEUTRAL:
                raise ValueError(
                    f"{self.where}: field {name!r} is not known for {family}, and it may change "
                    "the model's output. Remove it if it does not"
                    " [RL3002]"
                )
            self.only(name, *_NEUTRAL[name])

    def _refuse_layer_types(self) -> None:
        if "layer_types" not in self._read:
            kinds = set(self.get("layer_types", ()))
            if kinds - {"full_attention"}:
                raise ValueError(
                    f"{self.where}: layer_types has {sorted(kinds)}, "
                    "only 'full_attention' is supported"
                    " [RL3002]"
                )


def _how_to_fetch(name: str) -> str:
    """For what looks like the name of a model on the Hugging Face hub."""
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    return f". To fetch one: hf download {name} --local-dir FOLDER" if is_hub_name else ""


def read_json(path: str | Path) -> tuple[dict[str, Any], Path]:
    """``config.json`` of a Hugging Face folder, and where it is; ``ValueError`` without one."""
    folder = Path(path).expanduser()
    if folder.is_file():
        raise ValueError(
            f"model folder {folder} is a file: expected the Hugging Face folder that holds it, "
            f"{folder.parent} [RL3001]"
        )
    if not folder.is_dir():
        raise ValueError(
            f"model folder {folder} does not exist: "
            "model.path must be a local Hugging Face folder with config.json and safetensors files"
            f"{_how_to_fetch(str(path))} [RL3001]"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no config.json: it is not a Hugging Face model folder [RL3001]"
        )
    try:
        return dict(load_json(file)), file
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not a JSON object: {error} [RL3001]") from error


# Parts that families share. Each returns fields of `Architecture`.


def decoder(
    fields: Fields,
    *,
    default_kv_heads: bool = False,
    default_theta: float | None = None,
    partial_rotary: bool = False,
) -> dict[str, Any]:
    """Sizes, norms and the rotary embedding of a decoder with grouped-query attention."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads if default_kv_heads else None)
    if heads % kv_heads:
        raise ValueError(
            f"{fields.where}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}"
            " [RL3002]"
        )
    hidden = fields.size("hidden_size")
    return {
        "num_layers": fields.size("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": fields.size("head_dim", default=hidden // heads),
        "ffn_size": fields.size("intermediate_size"),
        "vocab_size": fields.size("vocab_size"),
        "norm_eps": float(fields.required("rms_norm_eps")),
        "tie_embeddings": fields.flag("tie_word_embeddings", default=False),
        "max_positions": fields.size("max_position_embeddings"),
        **rotary(fields, default_theta, partial_rotary),
    }


def experts(fields: Fields, *counts: str) -> dict[str, Any]:
    """How many experts there are, under one of the names ``counts``, and how a token uses them."""
    num_experts = fields.size(*counts)
    per_token = fields.size("num_experts_per_tok")
    if per_token > num_experts:
        raise ValueError(
            f"{fields.where}: num_experts_per_tok={per_token} is more than the "
            f"{num_experts} experts"
            " [RL3002]"
        )
    return {"num_experts": num_experts, "experts_per_token": per_token}


def normalized(fields: Fields, experts_per_token: int) -> bool:
    """``norm_topk_prob``; it cannot be true with one expert per token."""
    norm_topk_prob = fields.flag("norm_topk_prob")
    if norm_topk_prob and experts_per_token == 1:
        raise ValueError(
            f"{fields.where}: norm_topk_prob=true with one expert per token weighs every expert "
            "by 1, so that its router cannot learn; Megatron refuses it, too"
            " [RL3002]"
        )
    return norm_topk_prob


def every_nth_layer(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers with a router, as Qwen's models choose them."""
    step = fields.get("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    moe_layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    if not moe_layers:
        raise ValueError(
            f"{fields.where}: decoder_sparse_step={step} and mlp_only_layers={dense} leave no "
            "layer with a router"
            " [RL3002]"
        )
    return moe_layers


def from_layer(fields: Fields, name: str) -> tuple[int, ...]:
    """The layers with a router where field ``name`` says how many dense ones come first."""
    first, num_layers = fields.count(name), fields.size("num_hidden_layers")
    if first >= num_layers:
        raise ValueError(
            f"{fields.where}: {name}={first} of {num_layers} layers leaves none with a router"
            " [RL3002]"
        )
    return tuple(range(first, num_layers))


def heads_share_the_hidden_size(fields: Fields) -> None:
    """``head_dim`` must be hidden size / heads, since vLLM does not read it in the family."""
    fields.only("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))


def no_sliding_window(fields: Fields) -> None:
    """Qwen's sliding window is used only with ``use_sliding_window``."""
    fields.only("use_sliding_window", False)
    fields.ignore("sliding_window", "max_window_layers")


def rotary(
    fields: Fields, default_theta: float | None = None, partial_rotary: bool = False
) -> dict[str, Any]:
    """transformers 5 writes ``rope_parameters``, 4 writes ``rope_theta`` and ``rope_scaling``.

    ``partial_rotary``: whether the family supports a rotary embedding of a part of every head.
    """
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        declared = fields.get(name, {})
        differing = (key for key in settings.keys() & declared if settings[key] != declared[key])
        for key in sorted(differing):
            raise ValueError(
                f"{fields.where}: rope_scaling and rope_parameters differ in {key}: "
                f"{settings[key]!r} and {declared[key]!r}; keep the one that is true"
                " [RL3002]"
            )
        settings |= declared
    theta = settings.pop("rope_theta", None) or fields.get("rope_theta", default_theta)
    if theta is None:
        raise ValueError(f"{fields.where}: field rope_theta is missing [RL3002]")
    fields.ignore(*_ROTARY_FIELDS)
    # transformers 5 writes it in both places.
    outer_fraction = fields.get("partial_rotary_factor", 1.0)
    fraction = settings.pop("partial_rotary_factor", None) or outer_fraction
    if fraction != 1 and not partial_rotary:
        raise ValueError(
            f"{fields.where}: partial_rotary_factor={fraction} is not supported, only 1 [RL3002]"
        )
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    return {
        "rope_theta": float(theta),
        "rotary_fraction": float(fraction),
        "rotary_scaling": _scaling(kind, settings, fields),
    }


def _scaling(kind: str, settings: dict[str, Any], fields: Fields) -> Llama3Rotary | Yarn | None:
    names = {"original_max_position_embeddings": "original_max_positions"}
    arguments = {names.get(n, n): value for n, value in settings.items() if value is not None}
    kinds: dict[str, type[Llama3Rotary | Yarn] | None] = {
        "default": None,
        "llama3": Llama3Rotary,
        "yarn": Yarn,
    }
    if kind not in kinds:
        raise ValueError(
            f"{fields.where}: rope_scaling of type {kind!r} is not supported, "
            f"only {', '.join(kinds)}"
            " [RL3002]"
        )
    scaling = kinds[kind]
    try:
        if scaling is None:
            if arguments:
                raise TypeError(f"the default one has no {', '.join(sorted(arguments))}")
            return None
        if "original_max_positions" not in arguments:
            arguments["original_max_positions"] = fields.size("max_position_embeddings")
        return scaling(**arguments)
    except TypeError as error:
        declared = {"rope_type": kind, **settings}
        raise ValueError(
            f"{fields.where}: rope_scaling={declared!r} is not supported: {error} [RL3002]"
        ) from error
