"""Which parameters a model has, and of which Hugging Face tensors each is made. Needs no torch.

A family's `Layout` is a list of `Rule`s (see `rules.py`). `expand` spells the rules out for every
layer and expert, in one fixed order, under Megatron's names with *global* layer and expert numbers.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rltrain.weights.architecture.decoder import MLA, Architecture
from rltrain.weights.mapping.grid import Axis, GridPosition
from rltrain.weights.mapping.stacked_experts import Stacked


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor in a rule. ``shape`` is made of names that `sizes` knows."""

    name: str
    shape: str
    stacked: Stacked | None = None
    """Where else it may lie: in a tensor of all experts of a layer."""


@dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter: its name, what it is made of and how it is cut."""

    megatron: str
    parts: tuple[Part, ...]
    join: Literal["concat", "qkv"] = "concat"
    """``concat``: the parts below one another. ``qkv``: per key-value head, its queries, its key
    and its value, as Megatron's ``linear_qkv`` has them."""
    cut: int | None = None
    """The dim of every part that tensor parallelism cuts; None: every rank has all of it."""
    kind: Literal["trained", "frozen", "buffer"] = "trained"
    """``frozen`` has no gradient. Neither has a ``buffer``, which is fp32 in every checkpoint."""
    padded: bool = False
    """Rows of zeros follow where the vocabulary is no multiple of the tensor-parallel size."""


@dataclass(frozen=True)
class Layout:
    """The rules of one family, by the part of the model they are for."""

    first: tuple[Rule, ...]
    attention: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    moe: tuple[Rule, ...]
    expert: tuple[Rule, ...]
    last: tuple[Rule, ...]
    mtp: tuple[Rule, ...] = ()
    """Of a layer that predicts further tokens, and next, of its experts; ``{depth}`` counts it."""
    mtp_expert: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint: its classic name and shape, and where else it lies."""

    name: str
    shape: tuple[int, ...]
    stacked: Stacked | None
    expert: int | None

    @property
    def sent_as(self) -> str:
        """The name of what a checkpoint or an engine gets of it: perhaps that of all experts."""
        return self.stacked.name if self.stacked and self.stacked.only else self.name

    def sent_shape(self, num_experts: int) -> tuple[int, ...]:
        """The shape of that."""
        if self.sent_as == self.name:
            return self.shape
        assert self.stacked is not None
        return self.stacked.shape(num_experts, self.shape)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model."""

    name: str
    tensors: tuple[HfTensor, ...]
    rule: Rule
    layer: int | None = None
    expert: int | None = None
    copy: bool = False
    """It holds again what another parameter owns (tied embeddings): loaded, never sent."""

    def axis(self, placement: GridPosition) -> Axis:
        """The axis that cuts this parameter; one of size 1 where nothing does."""
        if self.rule.cut is None:
            return Axis()
        return placement.tp if self.expert is None else placement.etp


def sizes(arch: Architecture) -> dict[str, int]:
    """The words of a part's ``shape``."""
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


def expand(layout: Layout, arch: Architecture) -> tuple[Parameter, ...]:
    """All parameters of the model, in the order in which they are sent."""
    size = sizes(arch)

    def spell(rule: Rule, layer: int | None = None, expert: int | None = None) -> Parameter:
        def fill(name: str) -> str:
            depth = None if layer is None else layer - arch.num_layers
            return name.format(layer=layer, expert=expert, depth=depth)

        tensors = tuple(
            HfTensor(
                fill(part.name),
                tuple(size[word] for word in part.shape.split()),
                replace(part.stacked, name=fill(part.stacked.name)) if part.stacked else None,
                expert,
            )
            for part in rule.parts
        )
        return Parameter(fill(rule.megatron), tensors, rule, layer, expert)

    found = [spell(rule) for rule in layout.first]
    for layer in range(arch.num_layers):
        is_moe = layer in arch.moe_layers
        rules = layout.attention + (layout.moe if is_moe else layout.dense)
        found += [spell(rule, layer) for rule in rules]
        experts = range(arch.num_experts if is_moe else 0)
        found += [spell(rule, layer, e) for rule in layout.expert for e in experts]
    for layer in range(arch.num_layers, arch.num_layers + arch.mtp_layers):
        found += [spell(rule, layer) for rule in layout.mtp]
        found += [spell(r, layer, e) for r in layout.mtp_expert for e in range(arch.num_experts)]
    return (*found, *(spell(rule) for rule in layout.last))
