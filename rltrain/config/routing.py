"""Routing replay: whose experts the trainer uses."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section


class RoutingReplayConfig(Section):
    mode: Literal["off", "r2", "r3"] = "off"
    """``r3`` replays the rollout engine's experts in the log-probability pass and in the update;
    ``r2`` records Megatron's own in the log-probability pass and replays those in the update."""
    capture: bool = True
    """Ask the engine for its experts even where they are not replayed, to measure overlap."""
    sample_every: Annotated[int, Field(ge=1)] = 10
    """Steps between the sampled measurements (overlap per layer, paired native mismatch); the
    first step always samples."""
    min_overlap: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Mean share of a token's experts that native routing also picks, per layer, below which a run
    in mode r3 stops and names the layer. Chance is K/E."""
    reference: Literal["native", "replay"] = "native"

    @model_validator(mode="after")
    def r3_needs_capture(self) -> Self:
        if self.mode == "r3" and not self.capture:
            raise ValueError("mode=r3 replays captured routes: set routing_replay.capture=true")
        return self
