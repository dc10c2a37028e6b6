"""A model's parameters, and the Hugging Face tensors that each is made of. Needs no torch.

A family has `WeightRule`s (see `rules.py`). `expand_rules` applies them to every layer and expert,
in one fixed order, under Megatron's names with *global* numbers of layers and experts.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rltrain.weights.architecture.decoder import MLA, Architecture
from rltrain.weights.mapping.grid import AxisPosition, GridPosition
from rltrain.weights.mapping.stacked_experts import StackedSlice


@dataclass(frozen=True)
class TensorTemplate:
    """A Hugging Face tensor of a rule. ``shape`` consists of names that `dimension_sizes` has."""

    name: str
    shape: str
    stacked: StackedSlice | None = None
    """Its place in a tensor of all experts of a layer, if a checkpoint may have that instead."""


@dataclass(frozen=True)
class WeightRule:
    """One kind of Megatron parameter: its name, its Hugging Face tensors, the dim that is cut."""

    megatron: str
    templates: tuple[TensorTemplate, ...]
    join: Literal["concat", "qkv"] = "concat"
    """``concat``: the tensors are concatenated by rows. ``qkv``: each key-value head has its
    queries, its key and its value together, as in Megatron's ``linear_qkv``."""
    cut: int | None = None
    """The dim of every tensor that tensor parallelism cuts. None: every rank holds all of it."""
    kind: Literal["trained", "frozen", "buffer"] = "trained"
    """``frozen``: no gradient. ``buffer``: no gradient, and fp32 in every checkpoint."""
    padded: bool = False
    """Rows of zeros are appended if the tensor-parallel size does not divide the vocabulary."""


@dataclass(frozen=True)
class FamilyRules:
    """The weight rules of one family, by the part of the model that they apply to."""

    first: tuple[WeightRule, ...]
    attention: tuple[WeightRule, ...]
    dense: tuple[WeightRule, ...]
    moe: tuple[WeightRule, ...]
    expert: tuple[WeightRule, ...]
    last: tuple[WeightRule, ...]
    mtp: tuple[WeightRule, ...] = ()
    """Rules of a multi-token prediction layer. ``{depth}`` is its number, from 0."""
    mtp_expert: tuple[WeightRule, ...] = ()
    """Rules of that layer's experts."""


@dataclass(frozen=True)
class HfTensorSpec:
    """A tensor of a Hugging Face checkpoint: name and shape of one expert's, if it is an expert's.

    ``stacked`` is its place in a tensor of all experts, if a checkpoint may have that instead.
    """

    name: str
    shape: tuple[int, ...]
    stacked: StackedSlice | None
    expert: int | None

    @property
    def sent_as(self) -> str:
        """The name under which it is exported and synced: its own, or that of all experts."""
        return self.stacked.name if self.stacked and self.stacked.only else self.name

    def sent_shape(self, num_experts: int) -> tuple[int, ...]:
        """The shape of the tensor ``sent_as``."""
        if self.sent_as == self.name:
            return self.shape
        assert self.stacked is not None
        return self.stacked.shape(num_experts, self.shape)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model."""

    name: str
    tensors: tuple[HfTensorSpec, ...]
    rule: WeightRule
    layer: int | None = None
    expert: int | None = None
    copy: bool = False
    """It repeats another parameter (tied embeddings): it is loaded and never sent."""

    def axis(self, position: GridPosition) -> AxisPosition:
        """The axis that cuts this parameter. If nothing cuts it, the axis has size 1."""
        if self.rule.cut is None:
            return AxisPosition()
        return position.tp if self.expert is None else position.etp


def dimension_sizes(arch: Architecture) -> dict[str, int]:
    """The size of each name in a template's ``shape``."""
    return {
        "vocab": arch.vocab_size,
        "one": 1,
        "hidden": arch.hidden_size,
        "heads": arch.num_heads,
        "twice_hidden": 2 * arch.hidden_size,
        "q": arch.num_heads * arch.head_dim,
        "kv": arch.num_kv_heads * arch.head_dim,
        "head": arch.head_dim,
        "ffn": arch.ffn_size,
        "experts": arch.num_experts,
        "expert": arch.expert_size,
        "shared": arch.shared_expert_size,
        **(_latent_sizes(arch.mla, arch.num_heads) if arch.mla else {}),
    }


def _latent_sizes(mla: MLA, num_heads: int) -> dict[str, int]:
    return {
        "q_latent": mla.q_lora_rank or 0,
        "kv_latent": mla.kv_lora_rank,
        "kv_latent_and_rope": mla.kv_lora_rank + mla.qk_rope_head_dim,
        "k_nope_and_v": num_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
        "v": num_heads * mla.v_head_dim,
    }


def expand_rules(family: FamilyRules, arch: Architecture) -> tuple[ParameterSpec, ...]:
    """All parameters of the model, in the order in which they are sent."""
    size = dimension_sizes(arch)

    def apply(
        rule: WeightRule, layer: int | None = None, expert: int | None = None
    ) -> ParameterSpec:
        def fill(name: str) -> str:
            depth = None if layer is None else layer - arch.num_layers
            return name.format(layer=layer, expert=expert, depth=depth)

        tensors = tuple(
            HfTensorSpec(
                fill(template.name),
                tuple(size[word] for word in template.shape.split()),
                replace(template.stacked, name=fill(template.stacked.name))
                if template.stacked
                else None,
                expert,
            )
            for template in rule.templates
        )
        return ParameterSpec(fill(rule.megatron), tensors, rule, layer, expert)

    parameters = [apply(rule) for rule in family.first]
    for layer in range(arch.num_layers):
        is_moe = layer in arch.moe_layers
        rules = family.attention + (family.moe if is_moe else family.dense)
        parameters += [apply(rule, layer) for rule in rules]
        experts = range(arch.num_experts if is_moe else 0)
        parameters += [apply(rule, layer, e) for rule in family.expert for e in experts]
    for layer in range(arch.num_layers, arch.num_layers + arch.mtp_layers):
        parameters += [apply(rule, layer) for rule in family.mtp]
        experts = range(arch.num_experts)
        parameters += [apply(rule, layer, e) for rule in family.mtp_expert for e in experts]
    return (*parameters, *(apply(rule) for rule in family.last))
