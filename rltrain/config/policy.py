"""The model that learns: where its parts live and in what precision."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]
RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"
]


class ParallelConfig(Section):
    """Sizes of the Megatron process grid; the data-parallel size is what the ranks leave over."""

    tp: Positive = 1
    """Tensor parallelism, with sequence parallelism whenever it is above 1."""
    pp: Positive = 1
    """Pipeline stages."""
    vpp: Positive = 1
    """Model chunks of each stage; above 1 the pipeline schedule is interleaved."""
    first_stage_layers: Positive | None = None
    """Decoder layers of the first stage; null gives every stage without a number an even share."""
    last_stage_layers: Positive | None = None
    cp: Positive = 1
    """Context parallelism: every sequence is cut into 2 * cp chunks."""
    ep: Positive = 1
    etp: Positive = 1
    """Tensor parallelism inside an expert; Megatron's own default would be tp."""
    dp: Positive = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batch_multiple(self) -> int:
        """What must divide the number of micro-batches: the interleaved schedule takes them in
        groups of one per stage."""
        return self.pp if self.vpp > 1 else 1

    @model_validator(mode="after")
    def experts_fit_the_ranks(self) -> Self:
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise ValueError(
                f"ep*etp={self.ep * self.etp} does not divide "
                f"tp*cp*dp={self.tp * self.cp * self.dp}: expert parallelism spans those ranks. "
                "Raise dp or lower ep"
            )
        return self

    @model_validator(mode="after")
    def one_stage_is_not_shared_out(self) -> Self:
        cuts = {
            "vpp": self.vpp > 1,
            "first_stage_layers": self.first_stage_layers is not None,
            "last_stage_layers": self.last_stage_layers is not None,
        }
        if self.pp == 1 and any(cuts.values()):
            named = ", ".join(name for name, given in cuts.items() if given)
            raise ValueError(f"{named}: pp=1 is a single stage; raise pp or leave them out")
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
    max_tokens_per_scoring_micro_batch: Positive | None = None
    """The same where no gradient follows (old and reference log-probabilities, values), and so no
    activation is kept; null is 4 times ``max_tokens_per_micro_batch``."""
    kept_softmax_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory of the last pipeline stage's ranks to keep probabilities of a micro-batch's tokens in,
    from its forward pass to its backward pass, where the output head otherwise multiplies again.
    All take 2 bytes (fp32: 4) x tokens x vocabulary / tp; less keeps a part of the vocabulary."""
    recompute: Literal["none", "selective", "full"] = "none"
    """``full`` reruns whole layers in the backward pass, ``selective`` the modules named below."""
    recompute_modules: list[RecomputeModule] = Field(default=["core_attn"])
    """For ``selective``."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """For ``full``: every layer, ``recompute_num_layers`` at a time, or only the first
    ``recompute_num_layers`` layers of each chunk."""
    recompute_num_layers: Positive = 1
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks bucket by bucket while an update's last backward pass
    goes on, in place of all of them at its end."""
    transformer_engine: Literal["auto", "never"] = "auto"
    """``auto`` uses Transformer Engine on GPUs where it is installed, else the torch backend."""
    threads: Positive | None = None
    """Threads of each rank's operations on the CPU; null: on CPUs an even share of the cores, on
    GPUs one."""
    megatron_args: dict[str, Any] = Field(default_factory=dict)
    """Anything else Megatron's TransformerConfig takes; what rltrain sets itself, and what routing
    replay cannot survive, is refused at start."""

    @property
    def scoring_tokens(self) -> int:
        """Token budget of a forward pass that no backward pass follows."""
        return self.max_tokens_per_scoring_micro_batch or 4 * self.max_tokens_per_micro_batch

    @property
    def slot_align(self) -> int:
        """What must divide the slots a rank computes with: FP8 products take no other sizes."""
        if not self.megatron_args.get("fp8"):
            return 1
        recipe = str(self.megatron_args.get("fp8_recipe", "delayed"))
        return {"blockwise": 128, "mxfp8": 32}.get(recipe, 16)

    @model_validator(mode="after")
    def equal_lengths_for_allgather(self) -> Self:
        """Ranks of one expert group must then see equally many tokens: those of one micro-batch."""
        p = self.parallel
        if self.dispatcher == "allgather" and (p.pp > 1 or (p.tp * p.cp) % (p.ep * p.etp)):
            raise ValueError(
                f"dispatcher=allgather with pp={p.pp}, ep*etp={p.ep * p.etp} and tp*cp="
                f"{p.tp * p.cp}: it needs equally many tokens on all ranks of an expert group, "
                "which only ranks of one micro-batch have, and one length for all micro-batches of "
                "a pipeline; use dispatcher=alltoall"
            )
        return self
