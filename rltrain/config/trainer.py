"""The loop, its outputs and the machines it runs on."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]


class TrainerConfig(Section):
    steps: Positive = 500
    prompts_per_step: Positive = 64
    mini_batches: Positive = 1
    """Optimizer updates a step."""
    seed: int = 0
    eval_every: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations; the first and the last step always evaluate. 0 never does."""
    resume: Literal["auto", "never"] = "never"
    """``auto`` goes on from the newest checkpoint in ``output_dir``."""
    output_dir: str = "outputs/%Y-%m-%d_%H-%M-%S"
    """Folder of everything the run writes; strftime codes are filled in when it starts."""
    sync_every: Positive = 1
    """Steps between two pushes of the weights to the engines; above 1 rollouts are off-policy by up
    to that many steps less one."""
    invariants: Literal["stop", "warn"] = "stop"
    """What a first step that breaks an invariant of the trainer (docs/algorithms.md) does."""
    check_weight_sync: bool = False
    """After every sync compare all engine tensors bitwise with a fresh engine's. Slow."""

    @model_validator(mode="after")
    def resuming_needs_a_fixed_folder(self) -> Self:
        if self.resume == "auto" and "%" in self.output_dir:
            raise ValueError(
                f"resume=auto looks for checkpoints in output_dir, and {self.output_dir} is a new "
                "folder every time: set trainer.output_dir to the run to go on with"
            )
        return self


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints to resume from; the last step always saves. 0 never does."""
    last: bool = True
    """Keep the final weights, for ``rltrain export`` to read, in ``checkpoints/last``."""
    keep: Positive = 2
    trust: bool = False
    """Open a checkpoint from elsewhere, or one that does not say which model it is of. Its format
    holds pickles, which can run code."""


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_gpus: Positive | None = None
    """GPUs to use; null takes what Ray finds."""
    placement: Literal["auto", "colocated", "disaggregated"] = "auto"
    """Whether engines share the policy's GPUs, in turns, or have GPUs of their own. ``auto`` gives
    them their own where there are enough. On CPUs all share the cores."""
    address: str | None = None
    """A running Ray cluster; null starts a local one on loopback."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    call_timeout_s: Annotated[float, Field(gt=0)] = 7200.0

    @model_validator(mode="after")
    def gpus_are_for_cuda(self) -> Self:
        if self.device == "cpu" and self.num_gpus is not None:
            raise ValueError(
                f"device=cpu and num_gpus={self.num_gpus} contradict each other: drop one"
            )
        return self


class TrackingConfig(Section):
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """``auto`` is online when logged in, else offline."""
    project: str = "rltrain"
    name: str | None = None
    num_samples: Annotated[int, Field(ge=0)] = 8
    """Rollouts kept per evaluation for the table of samples and the report."""
