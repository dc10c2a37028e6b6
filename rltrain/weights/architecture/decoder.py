"""What a model is made of: the sizes and settings of a decoder, in the words of this project."""

from dataclasses import dataclass, replace
from typing import Literal

FamilyName = Literal[
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
]
ScoreFunction = Literal["softmax", "sigmoid"]
QKNorm = Literal["none", "heads", "all"]


@dataclass(frozen=True)
class Llama3Rotary:
    """Slower rotations for long contexts, as Llama 3.1 has them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Yarn:
    """YaRN (https://arxiv.org/abs/2309.00071): rotations of low frequency are slowed down."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    """With the next, the factor of queries and keys is a quotient of two; without, it is one."""
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    """The factor itself, where the checkpoint gives it."""
    truncate: bool = True
    """The borders between slowed and other dimensions are rounded to whole ones."""


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
    ``groups_per_token`` groups whose best experts have the largest sum of scores: the best one of
    each with softmax (DeepSeek-V2), the best two with sigmoid (V3)."""
    groups_per_token: int = 1
    routed_scaling: float = 1.0
    """Factor of the weights of the chosen experts."""
    shared_expert_size: int = 0
    """Intermediate size of the expert that every token goes through besides; 0: there is none."""
    shared_expert_gate: bool = False
    """Its output is multiplied by the sigmoid of one more linear map of the token."""
    qkv_bias: bool = False
    linear_bias: bool = False
    """Every linear map of a layer has a bias: queries, keys, values, output, router, experts."""
    swiglu_limit: float | None = None
    """With it the activation is gpt-oss's: gate and up are clamped to it, and what goes down is
    gate * sigmoid(1.702 gate) * (up + 1) in place of silu(gate) * up."""
    attention_sinks: bool = False
    """Every head's softmax has one more logit, learned and the same for every query, which no
    value belongs to."""
    window: int | None = None
    """How many tokens a token of a layer in ``windowed_layers`` attends to: itself and those right
    before it."""
    windowed_layers: tuple[int, ...] = ()
    qk_norm: QKNorm = "none"
    """Queries and keys are normed head by head, or over all heads together. With ``mla`` it says
    nothing: the latents are always normed."""
    rotary_fraction: float = 1.0
    """The part of every head, from its beginning, that the rotary embedding turns."""
    rotary_scaling: Llama3Rotary | Yarn | None = None
    mla: MLA | None = None
    """With it, ``head_dim`` is its ``qk_head_dim`` and ``num_kv_heads`` is ``num_heads``."""
    mtp_layers: int = 0
    """How many layers follow the last one to predict further tokens (docs/adr/0008-mtp.md)."""
    skipped_mtp_layers: int = 0
    """How many more its ``config.json`` names, which the checkpoint may lack and nobody holds."""
    value_head: bool = False
    """A critic: its output layer yields one number a token, and no Hugging Face folder has it."""

    def __post_init__(self) -> None:
        sigmoid = self.score_function == "sigmoid"
        if self.expert_bias and not sigmoid:
            raise ValueError("expert_bias needs score_function='sigmoid'")
        if sigmoid and not self.norm_topk_prob:
            raise ValueError(
                "score_function='sigmoid' needs norm_topk_prob=True: Megatron always normalizes "
                "the weights of a token's experts then"
            )
        if self.windowed_layers and self.window is None:
            raise ValueError(f"windowed_layers={self.windowed_layers} need a window")
        if self.num_groups > 1:
            self._check_groups()
        if self.mla:
            self._check_latent(self.mla)

    def _check_groups(self) -> None:
        if self.num_experts % self.num_groups or self.groups_per_token > self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts} and be "
                f"at least groups_per_token={self.groups_per_token}"
            )
        size = self.num_experts // self.num_groups
        if self.experts_per_token > self.groups_per_token * size:
            raise ValueError(
                f"groups_per_token={self.groups_per_token} groups of {size} experts have no "
                f"experts_per_token={self.experts_per_token}"
            )
        if self.score_function == "sigmoid" and size < 2:
            raise ValueError(f"num_groups={self.num_groups} leaves no two experts to score a group")

    def _check_latent(self, mla: MLA) -> None:
        if (self.head_dim, self.num_kv_heads) != (mla.qk_head_dim, self.num_heads):
            raise ValueError(
                f"with MLA head_dim={self.head_dim} must be qk_head_dim={mla.qk_head_dim} and "
                f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads}"
            )
        scaling = self.rotary_scaling
        if isinstance(scaling, Llama3Rotary) or self.rotary_fraction != 1:
            raise ValueError("Megatron's MLA has no llama3 rotary scaling and no rotary fraction")
        if scaling is None:
            return
        if scaling.attention_factor is not None or not scaling.truncate:
            raise ValueError("Megatron's MLA has YaRN with no attention_factor and truncate=True")
        if bool(scaling.mscale) != bool(scaling.mscale_all_dim):
            raise ValueError(
                f"mscale={scaling.mscale} and mscale_all_dim={scaling.mscale_all_dim}: with MLA "
                "give both or neither, since transformers and vLLM read one alone differently"
            )

    def with_value_head(self) -> "Architecture":
        """The critic of this model: all but the output layer is the same, and MTP layers, which
        predict tokens, are left out."""
        return replace(
            self,
            value_head=True,
            tie_embeddings=False,
            mtp_layers=0,
            skipped_mtp_layers=self.mtp_layers + self.skipped_mtp_layers,
        )

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding and of the output head, so that ``tp`` ranks hold equally many."""
        return -(-self.vocab_size // tp) * tp
