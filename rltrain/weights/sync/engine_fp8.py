"""FP8 weights for the rollout engine, while the policy trains in bf16 or fp32. Pure.

The matrices that multiply tokens are quantised in blocks, as in DeepSeek-V3's checkpoint, one
matrix at a time. Embedding, output head, norms, routers and other small tensors are not quantised.
So the engine's routers have the policy's weights; only their inputs differ.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.architecture.quantization_config import BLOCK
from rltrain.weights.families import model_parameters
from rltrain.weights.huggingface.quantized import quantize_fp8
from rltrain.weights.mapping.parameters import HfTensorSpec, ParameterSpec

LOAD_FORMAT = "rltrain"
"""vLLM's ``load_format`` for a folder whose storage format is not the engine's."""

_KEPT = {"embed_tokens", "lm_head", "gate", "router", "shared_expert_gate", "eh_proj"}


def _matrices(arch: Architecture) -> list[HfTensorSpec]:
    tensors = [t for p in model_parameters(arch) if not p.copy for t in p.tensors]
    return [tensor for tensor in tensors if len(tensor.shape) == 2]


def is_quantized(tensor: HfTensorSpec) -> bool:
    *_, module, kind = tensor.name.split(".")
    return len(tensor.shape) == 2 and kind == "weight" and module not in _KEPT


def fp8_config(arch: Architecture) -> dict[str, Any]:
    """``quantization_config`` for a ``config.json``: the modules that vLLM holds in FP8."""
    kept = [
        tensor.name.removesuffix(".weight")
        for tensor in _matrices(arch)
        if not is_quantized(tensor)
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": kept,
    }


def quantize_stream(
    tensors: Iterable[tuple[str, Tensor]], arch: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """The stream ``tensors``, each matrix as its FP8 numbers and ``NAME_scale_inv``.

    It holds a few fp32 copies of one matrix at a time. The result depends on the matrix alone, so
    every rank and every parallel layout sends the same bytes.
    """
    quantized = {tensor.name for tensor in _matrices(arch) if is_quantized(tensor)}
    for name, tensor in tensors:
        if name in quantized:
            values, scale = quantize_fp8(tensor)
            yield name, values
            yield f"{name}_scale_inv", scale
        else:
            yield name, tensor


def check_fp8_blocks(arch: Architecture, tensor_parallel: int) -> None:
    """Check that no block crosses a boundary where the engine joins or cuts a matrix.

    Raises:
        ValueError: naming the tensor, its shape and what to do.
    """
    if arch.family == "gpt_oss":
        raise ValueError(
            "rollout.quantization=fp8: vLLM holds gpt-oss' experts in MXFP4 or bf16, not in FP8 "
            "blocks; use rollout.quantization=none"
        )
    for parameter in model_parameters(arch):
        for tensor in parameter.tensors:
            if is_quantized(tensor) and (size := _misfit(parameter, tensor, tensor_parallel)):
                raise ValueError(
                    f"rollout.quantization=fp8: {tensor.name} has shape {list(tensor.shape)}, and "
                    f"the engine handles parts of {size} rows or columns of it "
                    f"(rollout.tensor_parallel={tensor_parallel}): expected a multiple of "
                    f"{BLOCK[0]}, the size of a block. Use rollout.quantization=none or a smaller "
                    "rollout.tensor_parallel"
                )


def _misfit(parameter: ParameterSpec, tensor: HfTensorSpec, tensor_parallel: int) -> int | None:
    """The engine's part size of the tensor if it is no multiple of a block; else None."""
    joined = len(parameter.tensors) > 1
    if parameter.rule.cut is None or not (joined or tensor_parallel > 1):
        return None
    size = tensor.shape[parameter.rule.cut] // tensor_parallel
    return size if size % BLOCK[parameter.rule.cut] else None
