"""The objective and its optimizer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class AlgorithmConfig(Section):
    type: Literal["grpo", "sft"] = "grpo"
    group_size: Positive = 8
    """G, responses sampled per prompt."""
    normalize_by_std: bool = True
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    bypass_old_logprobs: bool = False
    """Take the rollout's log-probabilities for the old ones, and save the pass that computes them.
    The importance ratio then spans the mismatch of engine and trainer, too."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference in the loss; 0 builds no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Over the mini-batch: mean over tokens, or mean over sequences of their token mean."""

    @model_validator(mode="after")
    def a_group_has_something_to_compare(self) -> Self:
        if self.type == "grpo" and self.group_size < 2:
            raise ValueError(
                "group_size=1 gives GRPO nothing to compare a response with: use 2 or more"
            )
        return self


class OptimizerConfig(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """In optimizer updates, not trainer steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    router_lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the routers; null takes ``lr``."""
    freeze_router: bool = False

    @model_validator(mode="after")
    def min_lr_at_most_lr(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        return self

    @model_validator(mode="after")
    def a_constant_lr_has_no_minimum(self) -> Self:
        if self.schedule == "constant" and self.min_lr > 0:
            raise ValueError(
                f"schedule=constant never reaches min_lr={self.min_lr}: choose linear or cosine"
            )
        return self

    @model_validator(mode="after")
    def a_frozen_router_has_no_lr(self) -> Self:
        if self.freeze_router and self.router_lr is not None:
            raise ValueError("freeze_router=true and router_lr contradict each other: drop one")
        return self
