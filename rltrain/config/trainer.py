"""The loop, its outputs and the machines it runs on."""

from typing import Annotated, Literal

from pydantic import Field

from rltrain.config.base import Section

Positive = Annotated[int, Field(gt=0)]


class TrainerConfig(Section):
    steps: Positive = 60
    prompts_per_step: Positive = 64
    mini_batches: Positive = 1
    """Optimizer updates a step."""
    seed: int = 0
    eval_every: Annotated[int, Field(ge=0)] = 10
    """Steps between evaluations; the first and the last step always evaluate. 0 never does."""
    resume: Literal["auto", "never"] = "never"
    """``auto`` goes on from the newest checkpoint in ``output_dir``."""
    output_dir: str = "outputs/${now:%Y-%m-%d_%H-%M-%S}"
    check_weight_sync: bool = False
    """After every sync compare all engine tensors bitwise with a fresh engine's. Slow."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: Positive = 2
    trust: bool = False
    """Open a checkpoint from elsewhere. Its format holds pickles, which can run code."""


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_gpus: Positive | None = None
    """GPUs to use; null takes what Ray finds."""
    address: str | None = None
    """A running Ray cluster; null starts a local one on loopback."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    call_timeout_s: Annotated[float, Field(gt=0)] = 1800.0


class TrackingConfig(Section):
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """``auto`` is online when logged in, else offline."""
    project: str = "rltrain"
    name: str | None = None
    num_samples: Annotated[int, Field(ge=0)] = 8
    """Rollouts kept per evaluation for the table of samples and the report."""
