"""Which model is trained."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import NotEmpty, Section

Positive = Annotated[int, Field(gt=0)]


class WarmStart(Section):
    """Supervised steps that the tiny model takes before reinforcement learning."""

    steps: Annotated[int, Field(ge=0)] = 300
    batch_size: Positive = 128
    lr: Annotated[float, Field(gt=0)] = 3e-3
    router_lr: Annotated[float, Field(gt=0)] = 1e-4
    """Keep it low, so that the gates stay as flat as those of a balanced model. If one expert has
    all the gate weight, an expert that flips at a near-tie has none, and replay has no effect."""
    num_problems: Positive = 4000
    """Number of problems of the warm start. They are disjoint from the training problems and from
    the held-out problems."""


class TinyModel(Section):
    """A Qwen3-MoE small enough for a laptop CPU, built locally with a small tokenizer."""

    num_layers: Positive = 4
    hidden_size: Positive = 128
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 32
    num_experts: Positive = 32
    experts_per_token: Positive = 4
    expert_size: Positive = 48
    seed: int = 0
    warm_start: WarmStart = WarmStart()

    @property
    def max_positions(self) -> int:
        return 2048

    @model_validator(mode="after")
    def kv_heads_divide_heads(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        return self

    @model_validator(mode="after")
    def experts_per_token_at_most_num_experts(self) -> Self:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than "
                f"num_experts={self.num_experts}"
            )
        return self


class ModelConfig(Section):
    path: NotEmpty | None = None
    """A local Hugging Face folder with the model. null: build the tiny model, warm-start it, and
    cache both."""
    weights: NotEmpty | None = None
    """A checkpoint that `rltrain import` made from `path`. null: read the weights from `path`."""
    tiny: TinyModel = TinyModel()
    cache_dir: NotEmpty = "~/.cache/rltrain"
    """Folder for what runs prepare once: the tiny model, and encoded data. Encoded data is removed
    when no run used it for 30 days, and the oldest of it beyond 20 GiB."""
    trust_remote_code: bool = False
    mtp: Literal["hold", "skip"] = "hold"
    """Multi-token-prediction layers. ``hold`` loads them, keeps them frozen and exports them again.
    ``skip`` does not load them: this saves their memory, and exports lack them. They are not
    trained (docs/adr/0008-mtp.md)."""

    @model_validator(mode="after")
    def weights_need_their_path(self) -> Self:
        if self.weights is not None and self.path is None:
            raise ValueError(
                f"weights={self.weights} needs path, the Hugging Face folder it was made of: the "
                "engines start from that, and configuration and tokenizer are read there"
            )
        return self
