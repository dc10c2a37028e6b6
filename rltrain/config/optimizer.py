"""Adam and its learning rate."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section


class OptimizerConfig(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Warm-up in optimizer updates, not trainer steps. The schedule ends after ``trainer.steps``
    times ``trainer.mini_batches`` updates. For the policy, the steps of ``critic.warmup_steps`` do
    not count. A mini-batch without a loss token makes no update and does not count."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global norm. 0: no clipping."""
    router_lr: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the routers. null: ``lr``."""
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
