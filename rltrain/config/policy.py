"""The policy that is trained: its parallel layout, precision and memory."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]
RecomputeModule = Literal[
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"
]


class ParallelConfig(Section):
    """Sizes of the Megatron process grid."""

    tp: Positive = 1
    """Tensor parallelism. If it is above 1, sequence parallelism is on too."""
    pp: Positive = 1
    """Pipeline stages."""
    vpp: Positive = 1
    """Model chunks per pipeline stage. If it is above 1, the pipeline schedule is interleaved."""
    first_stage_layers: Positive | None = None
    """Decoder layers of the first stage. null: stages without a number share the remaining layers
    evenly."""
    last_stage_layers: Positive | None = None
    """Decoder layers of the last stage, as ``first_stage_layers``."""
    cp: Positive = 1
    """Context parallelism. Every sequence is cut into 2 * cp chunks."""
    ep: Positive = 1
    """Expert parallelism."""
    etp: Positive = 1
    """Tensor parallelism inside an expert. The default of Megatron is tp; here it is 1."""
    dp: Positive = 1
    """Data parallelism."""

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
                " [RL1010]"
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
            named = ", ".join(name for name, is_set in cuts.items() if is_set)
            raise ValueError(f"{named}: pp=1 is a single stage; raise pp or leave them out")
        return self


class PrecisionConfig(Section):
    params: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the parameters. ``auto``: fp32 on CPUs, bf16 with fp32 master weights on GPUs."""
    router: Literal["fp32", "fp64", "params"] = "fp32"
    head: Literal["fp32", "params"] = "fp32"
    """Dtype of the output head's matrix product and of the log-softmax."""


class PolicyConfig(Section):
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    max_tokens_per_micro_batch: Positive = 8192
    """Maximum tokens of one forward pass of one rank, including padding."""
    max_tokens_per_scoring_micro_batch: Positive | None = None
    """Maximum tokens of a forward pass without gradients: old and reference log-probabilities, and
    values. It keeps no activations, so it can be larger. null: 4 times
    ``max_tokens_per_micro_batch``."""
    kept_softmax_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory per rank of the last pipeline stage, in GiB, to keep token probabilities from the
    forward pass to the backward pass. Without it, the backward pass repeats the matrix product of
    the output head. To keep all takes 2 bytes (fp32: 4) x tokens x vocabulary / tp. With less
    memory only a part of the vocabulary is kept."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass. ``full`` recomputes whole layers,
    ``selective`` the modules of ``recompute_modules``."""
    recompute_modules: list[RecomputeModule] = Field(default=["core_attn"])
    """Only with ``recompute=selective``: the modules to recompute."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Only with ``recompute=full``. ``uniform`` recomputes every layer, ``recompute_num_layers`` at
    a time. ``block`` recomputes only the first ``recompute_num_layers`` layers of each chunk."""
    recompute_num_layers: Positive = 1
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks bucket by bucket during the last backward pass of
    an update, instead of all of them at its end."""
    transformer_engine: Literal["auto", "never"] = "auto"
    """``auto`` uses Transformer Engine on GPUs if it is installed. Otherwise, and with ``never``,
    the torch backend is used."""
    threads: Positive | None = None
    """CPU threads per rank. null: an even share of the cores on CPUs, one on GPUs."""
    megatron_args: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of Megatron's TransformerConfig. Arguments that rltrain sets itself, or that
    break routing replay, are rejected at start."""

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
