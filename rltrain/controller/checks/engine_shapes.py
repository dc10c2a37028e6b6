"""What vLLM can run of the model: how it is cut over ranks, and the heads that its kernels know.

Imports no torch, no vLLM: which heads the CPU kernels know is read in the source of the installed
vLLM. GPU backends have no such list to hold a model to: where one lacks a head size, vLLM takes
another, and FlexAttention has all.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rltrain.config import Config
from rltrain.config.rollout import RolloutConfig
from rltrain.weights.architecture.decoder import Architecture

Device = Literal["cpu", "cuda"]

_BACKENDS = Path("v1", "attention", "backends")
CPU_ATTENTION, CPU_MLA = _BACKENDS / "cpu_attn.py", _BACKENDS / "mla" / "cpu_mla.py"
UNLISTED = (48,)
"""Head sizes that vLLM's CPU kernel has and its list lacks (0.30.0; a test asks the kernel)."""
BLOCK_MULTIPLE = 32
"""Of ``block_size`` on CPUs: vLLM finds no common block size for others (0.30.0)."""


def check_engine_shapes(config: Config, model: Architecture, device: Device) -> None:
    """The engine's ranks divide the model, and the device has what runs it."""
    check_tensor_parallel(config.rollout, model)
    check_expert_parallel(config, model, device)
    check_quantization(config.rollout.quantization, device)
    if device == "cpu":
        check_cpu_heads(model, config.model.path)
        check_cpu_blocks(config.rollout, model)


def check_tensor_parallel(rollout: RolloutConfig, model: Architecture) -> None:
    """vLLM divides these over its ranks, or asserts, after the engine was started."""
    ranks = rollout.tensor_parallel
    sizes = {"attention heads": model.num_heads}
    if model.mla is None and ranks < model.num_kv_heads:  # else every rank has a copy of some
        sizes["key-value heads"] = model.num_kv_heads
    if model.num_layers > len(model.moe_layers):
        sizes["rows of a dense layer (intermediate_size)"] = model.ffn_size
    if model.num_experts and not rollout.expert_parallel:
        sizes["rows of an expert (moe_intermediate_size)"] = model.expert_size
    if model.shared_expert_size:
        sizes["rows of the shared expert"] = model.shared_expert_size
    for unit, size in sizes.items():
        if size % ranks:
            raise ValueError(
                f"rollout.tensor_parallel={ranks}: expected a divisor of the {size} {unit} of the "
                "model"
                " [RL1010]"
            )
    if model.mla is None and ranks > model.num_kv_heads and ranks % model.num_kv_heads:
        raise ValueError(
            f"rollout.tensor_parallel={ranks}: expected a divisor or a multiple of the "
            f"{model.num_kv_heads} key-value heads of the model"
            " [RL1010]"
        )


def check_cpu_heads(model: Architecture, path: str | None) -> None:
    """vLLM's CPU attention is compiled for some head sizes, and its engine dies on any other."""
    where = "model.tiny.head_dim" if path is None else f"{path}/config.json: head_dim"
    if model.mla is None:
        known = cpu_head_sizes(CPU_ATTENTION, UNLISTED)
        if known and model.head_dim not in known:
            raise ValueError(
                f"{where}={model.head_dim}: expected one of {', '.join(map(str, known))}, the head "
                "sizes that vLLM's attention has on CPUs (v1/attention/backends/cpu_attn.py of the "
                "installed one). Choose another model, or roll out on a GPU"
                " [RL3008]"
            )
        return
    latent = model.mla.kv_lora_rank, model.mla.qk_rope_head_dim
    known = cpu_head_sizes(CPU_MLA)
    if known and (sum(latent) not in known or latent[0] != 512):
        raise ValueError(
            f"{path}/config.json: kv_lora_rank={latent[0]}, qk_rope_head_dim={latent[1]}: expected "
            f"512 and {known[0] - 512}, the only latent attention that vLLM has on CPUs "
            "(v1/attention/backends/mla/cpu_mla.py of the installed one). Choose another model, or "
            "roll out on a GPU"
            " [RL3008]"
        )


def check_cpu_blocks(rollout: RolloutConfig, model: Architecture) -> None:
    size = rollout.engine_args.get("block_size")
    if model.mla is None and isinstance(size, int) and size % BLOCK_MULTIPLE:
        raise ValueError(
            f"rollout.engine_args.block_size={size}: expected a multiple of {BLOCK_MULTIPLE} on a "
            "CPU, where vLLM's attention has no other. Leave it out"
            " [RL1013]"
        )


def cpu_head_sizes(file: Path, besides: tuple[int, ...] = ()) -> tuple[int, ...]:
    """What ``get_supported_head_sizes`` of a backend in the installed vLLM's ``file`` returns, and
    ``besides``, in order; none where there is no vLLM or it says so in other words."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ()
    source = Path(spec.submodule_search_locations[0]) / file
    listed_sizes = _returned(source, "get_supported_head_sizes") if source.is_file() else None
    if not (
        isinstance(listed_sizes, list)
        and listed_sizes
        and all(type(size) is int for size in listed_sizes)
    ):
        return ()
    return tuple(sorted({*listed_sizes, *besides}))


@cache
def _returned(source: Path, function: str) -> Any:
    """The literal that the first function of that name in ``source`` returns; None for another."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for statement in node.body:
                if isinstance(statement, ast.Return) and statement.value is not None:
                    try:
                        return ast.literal_eval(statement.value)
                    except ValueError:
                        return None
    return None


def check_quantization(quantization: Literal["none", "fp8"], device: Device) -> None:
    if quantization == "fp8" and device == "cpu":
        raise ValueError(
            "rollout.quantization=fp8: expected a GPU, found cluster.device=cpu. On CPUs vLLM "
            "multiplies FP8 weights with AMX instructions only, which few have and rltrain is not "
            "tested with. Use rollout.quantization=none; a folder with FP8 weights is read either "
            "way"
            " [RL3008]"
        )


def check_expert_parallel(config: Config, model: Architecture, device: Device) -> None:
    if not config.rollout.expert_parallel:
        return
    ranks = config.rollout.tensor_parallel
    if device == "cpu":
        raise ValueError(
            "rollout.expert_parallel=true: expected a GPU, found cluster.device=cpu, where vLLM's "
            "kernels take every rank to have all experts. Use rollout.expert_parallel=false"
            " [RL3008]"
        )
    if model.num_experts == 0 or model.num_experts % ranks:
        raise ValueError(
            f"rollout.expert_parallel=true, rollout.tensor_parallel={ranks}: expected a divisor of "
            f"the model's experts, found {model.num_experts} experts"
            " [RL1010]"
        )
