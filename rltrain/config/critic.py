"""The value model of PPO."""

from typing import Annotated, Literal

from pydantic import Field

from rltrain.config.base import Section
from rltrain.config.optimizer import OptimizerConfig


class CriticConfig(Section):
    """Built where the advantage needs values. It is laid out like the policy and never replays."""

    placement: Literal["shared", "own"] = "shared"
    """Whether its ranks share the policy's GPUs or have their own; on CPUs all share the cores."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """How far a value may move from the old one before its loss stops following; null is no clip.
    """
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps in which the critic alone is updated."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
