"""The model that learns: where its parts live and in what precision."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]


class ParallelConfig(Section):
    """Sizes of the Megatron process grid; the data-parallel size is what the ranks leave over."""

    tp: Positive = 1
    """Tensor parallelism, with sequence parallelism whenever it is above 1."""
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    etp: Positive = 1
    """Tensor parallelism inside an expert. Megatron's own default, tp, is unproven."""
    dp: Positive = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @model_validator(mode="after")
    def experts_fit_the_ranks(self) -> Self:
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise ValueError(
                f"ep*etp={self.ep * self.etp} does not divide "
                f"tp*cp*dp={self.tp * self.cp * self.dp}: expert parallelism spans those ranks. "
                "Raise dp or lower ep"
            )
        return self


class PrecisionConfig(Section):
    params: Literal["auto", "fp32", "bf16"] = "auto"
    """``auto`` is fp32 on CPU and bf16 (with fp32 masters) on GPU."""
    router: Literal["fp32", "fp64", "params"] = "fp32"
    head: Literal["fp32", "params"] = "fp32"
    """Dtype in which the output head multiplies, and the log-softmax runs."""


class PolicyConfig(Section):
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    max_tokens_per_micro_batch: Positive = 8192
    """Token budget of one forward pass of one rank, padding included."""
    recompute: Literal["none", "selective", "full"] = "none"
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    transformer_engine: Literal["auto", "never"] = "auto"
    """``auto`` uses Transformer Engine on GPUs where it is installed, else the torch backend."""
    threads: Positive | None = None
    """CPU only: intra-op threads of each rank; null shares the cores evenly."""
    megatron_args: dict[str, Any] = Field(default_factory=dict)
    """Anything else Megatron's TransformerConfig takes; what rltrain sets itself, and what routing
    replay cannot survive, is refused at start."""

    @model_validator(mode="after")
    def layouts_that_are_proven(self) -> Self:
        if self.parallel.pp > 1 or self.parallel.cp > 1 or self.parallel.etp > 1:
            raise ValueError(
                f"pp={self.parallel.pp}, cp={self.parallel.cp}, etp={self.parallel.etp}: this "
                "version has proven tp, ep and dp only; set pp=1, cp=1 and etp=1"
            )
        return self
