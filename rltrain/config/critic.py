"""The value model of PPO."""

from typing import Annotated, Literal

from pydantic import Field

from rltrain.config.base import Section
from rltrain.config.optimizer import OptimizerConfig


class CriticConfig(Section):
    """Built if the advantage needs values. It has the parallel layout of the policy and never
    replays routes."""

    placement: Literal["shared", "own"] = "shared"
    """``shared``: the ranks of the critic share the GPUs of the policy. ``own``: they have their
    own GPUs. On CPUs all share the cores."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Values are clipped to this distance from the old values in the value loss. null: no clip."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps in which only the critic is updated."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
