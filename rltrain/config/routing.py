"""Routing replay: whose experts the trainer uses."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Fallback = Literal["error", "live", "r2", "drop"]


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
    gate: Literal["stop", "warn"] = "stop"
    """What a run in mode r3 does where the routes of a sampled step are systematically wrong: in a
    layer, column, sample, expert or part of the samples, more experts lie far below the trainer's
    own choice than rounding explains. The message names where."""
    reference: Literal["native", "replay"] = "native"
    trace: bool = False
    """Compare hashes of what every router read and used, in every replayed pass, with those that
    the engine took of tokens and routes; a difference ends the run. Gathers the routes to do so."""
    fallback: Fallback = "error"
    """What a row whose captured route is missing or malformed does: ``error`` stops the run and
    names sample, row and layer; ``live`` lets the row choose anew in every pass; ``r2`` lets it
    choose in the log-probability pass and repeats that choice in the update; ``drop`` is ``live``
    with every later token of that sample out of the loss."""
    max_sample_fallback: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a sample's rows that may fall back; a sample above it leaves the loss whole."""
    max_batch_fallback: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of a step's rows that may fall back; above it the run stops."""

    @model_validator(mode="after")
    def r3_needs_capture(self) -> Self:
        if self.mode == "r3" and not self.capture:
            raise ValueError("mode=r3 replays captured routes: set routing_replay.capture=true")
        return self

    @model_validator(mode="after")
    def only_replayed_rows_fall_back(self) -> Self:
        if self.fallback != "error" and self.mode != "r3":
            raise ValueError(
                f"fallback={self.fallback} is for captured routes that are replayed, and mode="
                f"{self.mode} replays none: set routing_replay.mode=r3 or "
                "routing_replay.fallback=error"
            )
        return self
