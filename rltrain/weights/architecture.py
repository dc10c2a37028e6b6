"""What a model is made of, read from the ``config.json`` of a Hugging Face folder.

Every field of that file is either used here, or known not to change the forward pass, or must
have the one value under which it changes nothing. Anything else is an error that names the field:
a setting that is read past would train another model than the one vLLM runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from rltrain.weights.quantization import quantization

FamilyName = Literal["qwen3_moe", "qwen3", "deepseek_v3"]
ScoreFunction = Literal["softmax", "sigmoid"]

SUPPORTED: dict[str, FamilyName] = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3ForCausalLM": "qwen3",
}
"""Hugging Face architecture class -> family that `read_architecture` reads."""


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: queries, keys and values come from low-rank latents."""

    q_lora_rank: int | None
    """None: queries are made from the hidden state at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """The part of a query and a key that the rotary embedding leaves alone, and next, turns."""
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class Architecture:
    """Sizes and settings of a decoder, in the words of this project. Layers count from 0."""

    family: FamilyName
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Intermediate size of the layers without a router."""
    vocab_size: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    num_experts: int = 0
    """0 for a dense model, as are the next two."""
    experts_per_token: int = 0
    expert_size: int = 0
    norm_topk_prob: bool = False
    """True: softmax over the chosen logits. False: over all of them, before the choice."""
    moe_layers: tuple[int, ...] = ()
    """The layers that have a router."""
    score_function: ScoreFunction = "softmax"
    """What makes scores of the router's logits."""
    expert_bias: bool = False
    """A bias per expert is added to the scores for the choice, and not for the weights."""
    num_groups: int = 1
    """Experts come in so many equal groups. A token takes its experts from those
    ``groups_per_token`` groups whose two best experts have the largest sum of scores."""
    groups_per_token: int = 1
    routed_scaling: float = 1.0
    """Factor of the weights of the chosen experts."""
    shared_expert_size: int = 0
    """Intermediate size of the expert that every token goes through besides; 0: there is none."""
    qk_norm: bool = True
    """Queries and keys are normed head by head; with ``mla`` their latents are."""
    mla: MLA | None = None
    """With it, ``head_dim`` is its ``qk_head_dim`` and ``num_kv_heads`` is ``num_heads``."""
    mtp_layers: int = 0
    """How many layers follow the last one to predict further tokens (docs/adr/0008-mtp.md)."""

    def __post_init__(self) -> None:
        sigmoid = self.score_function == "sigmoid"
        if not sigmoid and (self.expert_bias or self.num_groups > 1):
            raise ValueError("expert_bias and num_groups > 1 need score_function='sigmoid'")
        if sigmoid and not self.norm_topk_prob:
            raise ValueError(
                "score_function='sigmoid' needs norm_topk_prob=True: Megatron always normalizes "
                "the weights of a token's experts then"
            )
        if self.num_groups > 1:
            self._check_groups()
        if self.mla and (self.head_dim, self.num_kv_heads) != (
            self.mla.qk_head_dim,
            self.num_heads,
        ):
            raise ValueError(
                f"with MLA head_dim={self.head_dim} must be qk_head_dim={self.mla.qk_head_dim} and "
                f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads}"
            )

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups or self.groups_per_token > self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts} and be "
                f"at least groups_per_token={self.groups_per_token}"
            )
        # Megatron adds up the best experts_per_token // groups_per_token of a group. For 0 of them
        # every group scores the same, and it picks any without a word.
        if self.experts_per_token // self.groups_per_token != 2:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} of "
                f"groups_per_token={self.groups_per_token} groups: Megatron scores a group by its "
                "two best experts only where the quotient is 2"
            )

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding and of the output head, so that ``tp`` ranks hold equally many."""
        return -(-self.vocab_size // tp) * tp


def read_architecture(path: str | Path) -> Architecture:
    """The architecture of the model in folder ``path``; ``ValueError`` when it is not supported."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"model folder {folder} does not exist: "
            "model.path must be a local Hugging Face folder with config.json and safetensors files"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    try:
        config = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error
    return architecture_from_config(config, str(file))


def architecture_from_config(config: Mapping[str, Any], where: str) -> Architecture:
    """As ``read_architecture``, from the parsed file; ``where`` stands in the errors."""
    fields = _Fields(config, where)
    family = _family(fields)
    _refuse_what_changes_the_forward(fields, family)
    shared: dict[str, Any] = {
        "family": family,
        "num_layers": fields.size("num_hidden_layers"),
        "hidden_size": fields.size("hidden_size"),
        "num_heads": fields.size("num_attention_heads"),
        "num_kv_heads": fields.size("num_key_value_heads"),
        "head_dim": _head_dim(fields, family),
        "ffn_size": fields.size("intermediate_size"),
        "vocab_size": fields.size("vocab_size"),
        "rope_theta": _rope_theta(fields),
        "norm_eps": float(fields.required("rms_norm_eps")),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_positions": fields.size("max_position_embeddings"),
    }
    if shared["num_heads"] % shared["num_kv_heads"]:
        raise ValueError(
            f"{where}: num_attention_heads={shared['num_heads']} is not a multiple of "
            f"num_key_value_heads={shared['num_kv_heads']}"
        )
    experts = _experts(fields, shared["num_layers"]) if family == "qwen3_moe" else {}
    return Architecture(**shared, **experts)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Used above or below; each family has these and no other.
_USED = _names(
    "architectures model_type num_hidden_layers hidden_size num_attention_heads "
    "num_key_value_heads head_dim intermediate_size vocab_size rope_theta rope_scaling "
    "rope_parameters rms_norm_eps tie_word_embeddings max_position_embeddings"
)
_USED_BY_MOE = _names(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
    "decoder_sparse_step mlp_only_layers"
)
# Metadata, generation, initialisation, and what training with rltrain decides itself (dropout is
# off, auxiliary losses are ours). `sliding_window` and `max_window_layers` act only with
# `use_sliding_window`, which must be false.
_IRRELEVANT = _names(
    "_name_or_path _commit_hash transformers_version torch_dtype dtype use_cache bos_token_id "
    "eos_token_id pad_token_id initializer_range attention_dropout output_router_logits "
    "router_aux_loss_coef sliding_window max_window_layers auto_map output_attentions "
    "output_hidden_states return_dict attn_implementation _attn_implementation quantization_config"
)
# Fields with the only values (absent is one, too) under which the forward is the one we compute.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (0,),
}


def _refuse_what_changes_the_forward(fields: "_Fields", family: FamilyName) -> None:
    known = _USED | _IRRELEVANT | (_USED_BY_MOE if family == "qwen3_moe" else frozenset())
    quantization(fields.config, fields.where)
    for name, value in fields.config.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                wanted = " or ".join(repr(v) for v in _NEUTRAL[name])
                raise ValueError(
                    f"{fields.where}: {name}={value!r} is not supported, only {wanted}"
                )
        elif name == "layer_types":
            if value is not None and set(value) != {"full_attention"}:
                raise ValueError(
                    f"{fields.where}: layer_types has {sorted(set(value))}, "
                    "only 'full_attention' is supported"
                )
        elif name not in known:
            raise ValueError(
                f"{fields.where}: field {name!r} is not known for {family}, and it may change the "
                "model's output. Remove it if it does not"
            )


@dataclass(frozen=True)
class _Fields:
    """A parsed ``config.json`` and where it came from, for the errors."""

    config: Mapping[str, Any]
    where: str

    def required(self, *names: str) -> Any:
        """The value of the first of ``names`` that is there."""
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        raise ValueError(f"{self.where}: field {' or '.join(names)} is missing")

    def size(self, *names: str) -> int:
        value = self.required(*names)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(
                f"{self.where}: {names[0]} must be a positive whole number, found {value!r}"
            )
        return value


def _family(fields: _Fields) -> FamilyName:
    named = fields.config.get("architectures") or []
    if len(named) != 1 or named[0] not in SUPPORTED:
        raise ValueError(
            f"{fields.where}: architectures={named!r} is not supported; "
            f"supported are {', '.join(sorted(SUPPORTED))}"
        )
    return SUPPORTED[named[0]]


def _head_dim(fields: _Fields, family: FamilyName) -> int:
    # transformers defaults it to hidden / heads for Qwen3-MoE and to 128 for Qwen3.
    if fields.config.get("head_dim") is None and family == "qwen3_moe":
        return fields.size("hidden_size") // fields.size("num_attention_heads")
    return fields.size("head_dim")


def _rope_theta(fields: _Fields) -> float:
    """transformers 5 writes ``rope_parameters``, 4 writes ``rope_theta`` and ``rope_scaling``."""
    rope = cast("dict[str, Any]", fields.config.get("rope_parameters") or {})
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.config.get(name) or {}
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default" or set(value) - {"rope_type", "type", "rope_theta"}:
            raise ValueError(
                f"{fields.where}: {name}={value!r} is not supported, only the default rotary "
                "embedding without scaling is"
            )
    if "rope_theta" in rope:
        return float(rope["rope_theta"])
    return float(fields.required("rope_theta"))


def _experts(fields: _Fields, num_layers: int) -> dict[str, Any]:
    num_experts = fields.size("num_experts", "num_local_experts")
    experts_per_token = fields.size("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ValueError(
            f"{fields.where}: num_experts_per_tok={experts_per_token} is more than the "
            f"{num_experts} experts"
        )
    norm_topk_prob = bool(fields.required("norm_topk_prob"))
    if norm_topk_prob and experts_per_token == 1:
        raise ValueError(
            f"{fields.where}: norm_topk_prob=true with one expert per token weighs every expert "
            "by 1, so that its router cannot learn; Megatron refuses it, too"
        )
    step = fields.config.get("decoder_sparse_step") or 1
    dense = fields.config.get("mlp_only_layers") or []
    moe_layers = tuple(n for n in range(num_layers) if n not in dense and (n + 1) % step == 0)
    if not moe_layers:
        raise ValueError(
            f"{fields.where}: decoder_sparse_step={step} and mlp_only_layers={dense} leave no "
            "layer with a router"
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "expert_size": fields.size("moe_intermediate_size"),
        "norm_topk_prob": norm_topk_prob,
        "moe_layers": moe_layers,
    }
