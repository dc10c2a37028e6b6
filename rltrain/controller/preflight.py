"""What must be true of files and machine before anything starts. Imports no torch by itself.

Each check raises ``ValueError`` with what was expected, what was found and what to do.
"""

import logging
import os
import re
import tempfile
from dataclasses import replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from rltrain.config import Config
from rltrain.config.algorithm import AlgorithmConfig
from rltrain.config.files import NAME as CONFIG_FILE
from rltrain.config.model import ModelConfig, TinyModel
from rltrain.config.policy import PolicyConfig
from rltrain.config.trainer import ClusterConfig
from rltrain.controller.engine_guards import (
    check_capture_options,
    check_capture_version,
    check_engine,
    check_logits_processors,
)
from rltrain.environments.rewards import load_reward
from rltrain.parallel.layers import Pipeline
from rltrain.weights import manifest
from rltrain.weights.architecture import Architecture
from rltrain.weights.families import read_architecture
from rltrain.weights.mtp import MTP
from rltrain.weights.stored import HUGGINGFACE

_log = logging.getLogger(__name__)

RANKS_PER_CORE = 4
"""Ranks wait for each other more than they compute at small sizes; beyond this they only wait."""


def preflight(config: Config) -> None:
    """Run the checks that concern ``config``; the output folder comes last and is created."""
    model = read_sizes(config)
    check_layout(config, model)
    check_data(config)
    if config.algorithm.type == "rl":
        check_lengths(config, model)
        check_algorithm(config.algorithm)
        check_critic(config)
        check_replay(config, model)
        name, version = check_engine()
        check_logits_processors()
        if config.routing_replay.capture:
            check_capture_version(name, version)
            check_capture_options(
                config.rollout.engine_args, os.environ, device(config.cluster), version
            )
        load_reward(config.data.reward.function)
        if config.cluster.address is None:
            check_quantization(config.rollout.quantization, device(config.cluster))
            check_expert_parallel(config, model, device(config.cluster))
    if config.cluster.address is None:
        check_ranks(config, device(config.cluster), count_cores(), count_gpus())
    if config.model.path is not None:
        check_weights(config.model.path, config.model.mtp, bridge=config.model.bridge)
    check_imported(config.model)
    check_output(config)


class Sizes(NamedTuple):
    """What of the model the layout must divide."""

    num_heads: int
    num_kv_heads: int
    num_experts: int
    """0 for a dense model."""
    num_layers: int
    expert_size: int
    max_positions: int


def read_sizes(config: Config) -> Sizes:
    model: TinyModel | Architecture = config.model.tiny
    if config.model.path is not None:
        model = read_architecture(config.model.path, bridge=config.model.bridge)
        if model.family == "bridged":
            _log.warning(
                "model.bridge=true: rltrain does not map the family of %s and no test of it proves "
                "the family against transformers; megatron-bridge builds it and maps its weights",
                config.model.path,
            )
    return Sizes(
        model.num_heads,
        model.num_kv_heads,
        model.num_experts,
        model.num_layers,
        model.expert_size,
        model.max_positions,
    )


def check_layout(config: Config, model: Sizes) -> None:
    layout, engine = config.policy.parallel, config.rollout.tensor_parallel
    for key, parts, what, size in (
        ("policy.parallel.tp", layout.tp, "attention heads", model.num_heads),
        ("policy.parallel.tp", layout.tp, "key-value heads", model.num_kv_heads),
        ("rollout.tensor_parallel", engine, "attention heads", model.num_heads),
    ):
        if size % parts:
            raise ValueError(f"{key}={parts}: expected a divisor of the {size} {what} of the model")
    if layout.ep > 1 and (model.num_experts == 0 or model.num_experts % layout.ep):
        raise ValueError(
            f"policy.parallel.ep={layout.ep}: expected a divisor of the model's experts, found "
            f"{model.num_experts} experts"
        )
    if layout.etp > 1 and (model.expert_size == 0 or model.expert_size % layout.etp):
        raise ValueError(
            f"policy.parallel.etp={layout.etp}: expected a divisor of the experts' intermediate "
            f"size, found {model.expert_size}"
        )
    stages = Pipeline.of(layout)
    for stage, chunk in product(range(layout.pp), range(layout.vpp)):
        check_recompute(config.policy, len(stages.chunk_layers(model.num_layers, stage, chunk)))


def check_lengths(config: Config, model: Sizes) -> None:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if prompt + response > model.max_positions:
        raise ValueError(
            f"data.max_prompt_tokens={prompt} and rollout.max_response_tokens={response}: expected "
            f"together at most the {model.max_positions} positions of the model in "
            f"{config.model.path}"
        )


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """There are such an advantage and such a loss, and they have what they need."""
    # These need torch, which takes seconds: imported here, and called after what is quick.
    from rltrain.algorithms.advantages import find_advantage
    from rltrain.algorithms.losses import find_loss

    find_loss(algorithm.loss)
    if find_advantage(algorithm.advantage).compares and algorithm.group_size < 2:
        raise ValueError(
            f"algorithm.advantage={algorithm.advantage} compares the responses to a prompt, and "
            f"algorithm.group_size={algorithm.group_size} gives it nothing to compare one with: "
            "use 2 or more"
        )


def check_critic(config: Config) -> None:
    """The model can have a critic, where the advantage needs one."""
    from rltrain.algorithms.advantages import needs_critic

    if config.model.path is not None and needs_critic(config.algorithm):
        read_architecture(config.model.path, bridge=config.model.bridge).with_value_head()


def check_recompute(policy: PolicyConfig, num_layers: int) -> None:
    """Megatron reruns ``recompute_num_layers`` at a time and would run past the chunk's last."""
    uniform = policy.recompute == "full" and policy.recompute_method == "uniform"
    if uniform and num_layers % policy.recompute_num_layers:
        raise ValueError(
            f"policy.recompute_num_layers={policy.recompute_num_layers}: expected a divisor of the "
            f"{num_layers} layers of a pipeline chunk; with policy.recompute_method=block it need "
            "not be"
        )


def check_replay(config: Config, model: Sizes) -> None:
    replay = config.routing_replay
    if model.num_experts == 0 and (replay.mode != "off" or replay.capture):
        raise ValueError(
            f"routing_replay.mode={replay.mode}, capture={str(replay.capture).lower()}: expected a "
            f"model with routers, found a dense one in {config.model.path}. Choose a "
            "mixture-of-experts model, or set routing_replay=off routing_replay.capture=false"
        )


def check_quantization(
    quantization: Literal["none", "fp8"], device: Literal["cpu", "cuda"]
) -> None:
    if quantization == "fp8" and device == "cpu":
        raise ValueError(
            "rollout.quantization=fp8: expected a GPU, found cluster.device=cpu. On CPUs vLLM "
            "multiplies FP8 weights with AMX instructions only, which few have and rltrain is not "
            "tested with. Use rollout.quantization=none; a folder with FP8 weights is read either "
            "way"
        )


def check_expert_parallel(config: Config, model: Sizes, device: Literal["cpu", "cuda"]) -> None:
    if not config.rollout.expert_parallel:
        return
    ranks = config.rollout.tensor_parallel
    if device == "cpu":
        raise ValueError(
            "rollout.expert_parallel=true: expected a GPU, found cluster.device=cpu, where vLLM's "
            "kernels take every rank to have all experts. Use rollout.expert_parallel=false"
        )
    if model.num_experts == 0 or model.num_experts % ranks:
        raise ValueError(
            f"rollout.expert_parallel=true, rollout.tensor_parallel={ranks}: expected a divisor of "
            f"the model's experts, found {model.num_experts} experts"
        )


def check_weights(path: str, mtp: MTP = "hold", *, bridge: bool = False) -> None:
    """The headers of all weight files fit ``config.json``, so that no rank fails half-way."""
    # Reads no weights, but needs torch, which takes seconds: so it is imported here, and called
    # after what is quick.
    from rltrain.weights.load import open_checkpoint

    open_checkpoint(path, read_architecture(path, mtp, bridge=bridge))


def check_imported(model: ModelConfig) -> None:
    """The imported checkpoint is whole, and of the model in ``path``; then it may be opened."""
    if model.weights is None or model.path is None:
        return
    weights = Path(model.weights).expanduser()
    manifest.check(weights)
    found, expected = (
        replace(read_architecture(folder, model.mtp), skipped_mtp_layers=0)
        for folder in (weights / HUGGINGFACE, model.path)
    )
    if found != expected:
        raise ValueError(
            f"model.weights={weights}: expected what rltrain import made of "
            f"model.path={model.path}, found the weights of another architecture"
        )


def check_data(config: Config) -> None:
    for key, path in (("path", config.data.path), ("eval_path", config.data.eval_path)):
        if path is not None and not Path(path).expanduser().exists():
            raise ValueError(
                f"data.{key}={path}: expected a file or folder, found nothing there (relative "
                f"paths start at {Path.cwd()})"
            )


def device(cluster: ClusterConfig) -> Literal["cpu", "cuda"]:
    """Where the run computes: ``auto`` is cuda when a GPU is visible and torch can use one."""
    if cluster.device == "auto":
        return "cuda" if count_gpus() and "+cpu" not in metadata.version("torch") else "cpu"
    return cluster.device


def count_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def count_gpus() -> int:
    """GPUs this process may use, read from the driver's device files."""
    present = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    return min(len(present), len([name for name in visible.split(",") if name.strip()]))


def check_ranks(config: Config, device: Literal["cpu", "cuda"], cores: int, gpus: int) -> None:
    """Every rank has a place (see `placement.place_on_gpus`), and weights a way between them.

    On a CPU at most ``RANKS_PER_CORE`` ranks a core, all together.
    """
    # It needs torch, which takes seconds.
    from rltrain.controller.placement import Placement, arithmetic, count_ranks, place_on_gpus
    from rltrain.controller.transfer import check_transfer

    ranks = count_ranks(config)
    if device == "cpu" and ranks > RANKS_PER_CORE * cores:
        raise ValueError(
            f"expected at most {RANKS_PER_CORE} ranks a core, {RANKS_PER_CORE * cores} on {cores} "
            f"cores, found {ranks}: {arithmetic(config)}. Lower policy.parallel.* or "
            "rollout.num_engines"
        )
    if device == "cpu":
        check_transfer(config, Placement("cpu"))
        return
    usable = gpus if config.cluster.num_gpus is None else config.cluster.num_gpus
    if usable > gpus or gpus == 0:
        raise ValueError(
            f"cluster.device=cuda: expected {max(usable, 1)} GPUs, found {gpus} visible ones: "
            "check nvidia-smi and CUDA_VISIBLE_DEVICES, or set cluster.device=cpu"
        )
    check_transfer(config, place_on_gpus(config, usable))


def check_output(config: Config) -> None:
    """The folder can be written and holds no other run; it is created."""
    folder = Path(config.trainer.output_dir)
    if config.trainer.resume == "never" and (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"trainer.output_dir={folder}: expected a new or empty folder, found an earlier run. "
            "Set trainer.resume=auto to go on with it, or choose another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"trainer.output_dir={folder}: expected a folder that can be written, found: "
            f"{error.strerror}. Choose another folder"
        ) from error
