"""Routing replay: which experts the trainer uses."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Fallback = Literal["error", "live", "r2", "drop"]


class RoutingReplayConfig(Section):
    mode: Literal["off", "r2", "r3"] = "off"
    """``r3`` replays the experts of the rollout engine in the log-probability pass and in the
    update. ``r2`` records the experts that Megatron chooses in the log-probability pass, and
    replays them in the update. ``off`` replays nothing."""
    capture: bool = True
    """Capture the experts of the engine. If they are not replayed, they serve to measure
    overlap."""
    sample_every: Annotated[int, Field(ge=1)] = 10
    """Steps between the sampled measurements: overlap per layer, and paired native mismatch. The
    first step is always sampled."""
    min_overlap: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Minimum overlap per layer: the mean share of a token's experts that native routing also
    picks. A run in mode r3 stops below it and names the layer. Random experts have an overlap of
    K/E."""
    gate: Literal["stop", "warn"] = "stop"
    """What a run in mode r3 does if the routes of a sampled step are systematically wrong. They are
    if in a layer, column, sample, expert or part of the samples more experts score far below the
    trainer's choice than rounding explains. ``stop`` ends the run, ``warn`` goes on. The message
    names the place."""
    reference: Literal["native", "replay"] = "native"
    """Routing of the reference model: its own choice (``native``), or the replayed routes
    (``replay``)."""
    trace: bool = False
    """Debugging: in every pass that replays the rollout's routes, compare hashes of the tokens and
    routes that every router used with the hashes that the engine took. A difference ends the run.
    This gathers the routes of all ranks."""
    fallback: Fallback = "error"
    """What to do with a row whose captured route is missing or malformed. ``error`` stops the run
    and names sample, row and layer. ``live`` lets the router choose in every pass. ``r2`` lets the
    router choose in the log-probability pass and replays that choice in the update. ``drop`` is
    ``live``, and all later tokens of that sample leave the loss."""
    max_age: Annotated[int, Field(ge=0)] | None = None
    """With ``trainer.max_staleness``: replay only routes whose weights are at most so many steps
    older than the policy. Rows with older routes do what ``fallback`` says, ``live`` or ``r2``, and
    do not count against its limits. null: replay them all."""
    min_gate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """In mode r3, keep a replayed expert only if its gate is at least so many times the smallest
    gate of the router's own choice. The best of that choice takes its place, in the
    log-probability pass; the update replays what that pass used. 0: keep all."""
    max_sample_fallback: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Maximum share of the rows of a sample that may fall back. A sample above it leaves the
    loss."""
    max_batch_fallback: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Maximum share of the rows of a step that may fall back. The run stops above it."""

    @model_validator(mode="after")
    def r3_needs_capture(self) -> Self:
        if self.mode == "r3" and not self.capture:
            raise ValueError("mode=r3 replays captured routes: set routing_replay.capture=true")
        return self

    @model_validator(mode="after")
    def rows_with_older_routes_choose_in_some_way(self) -> Self:
        if self.max_age is not None and self.fallback not in ("live", "r2"):
            raise ValueError(
                f"max_age={self.max_age} does not replay older routes, and fallback="
                f"{self.fallback} does not say how such rows choose: set "
                "routing_replay.fallback to live or r2"
            )
        return self

    @model_validator(mode="after")
    def gates_judge_what_is_replayed(self) -> Self:
        if self.min_gate_ratio and self.mode != "r3":
            raise ValueError(
                f"min_gate_ratio={self.min_gate_ratio:g} judges the experts of the rollout, and "
                f"mode={self.mode} replays none: set routing_replay.mode=r3 or min_gate_ratio=0"
            )
        if self.min_gate_ratio and self.trace:
            raise ValueError(
                "trace=true compares what routers use with what the engine used, and "
                f"min_gate_ratio={self.min_gate_ratio:g} changes it: use one of the two"
            )
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
