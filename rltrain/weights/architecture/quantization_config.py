"""What ``quantization_config`` in a folder's ``config.json`` says of its weights. Imports no torch.

Two formats are read as if the weights were plain: FP8 in blocks (DeepSeek-V3, Kimi-K2, and what
transformers writes) and MXFP4 (gpt-oss). Every field is either used here or changes only how the
activations of an inference engine are rounded; any other is an error that names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK = (128, 128)
"""Rows and columns that share a scale: what DeepSeek chose and every kernel expects."""

_FP8_FIELDS = {
    "quant_method": ("fp8",),
    "weight_block_size": (list(BLOCK),),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),  # static ones come with tensors that we would drop
    "scale_fmt": (None, "float", "ue8m0"),  # either way the scales are stored as numbers
    "store_dtype": (None,),
}
_MXFP4_FIELDS = {"quant_method": ("mxfp4",)}
# Which modules are quantised is read from the tensors themselves. `dequantize` is about loading.
_LISTS = {"modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize"}


@dataclass(frozen=True)
class BlockFP8:
    """``NAME`` is float8_e4m3fn ``[.., R, C]``, ``NAME_scale_inv`` the factor of each block."""

    block: tuple[int, int] = BLOCK


@dataclass(frozen=True)
class MXFP4:
    """A stacked tensor ``NAME`` ``[E, columns, rows]`` lies as ``NAME_blocks`` and ``NAME_scales``.

    Blocks: uint8 ``[E, rows, columns / 32, 16]``, two values a byte; scales: uint8
    ``[E, rows, columns / 32]``, exponents.
    """


Quantization = BlockFP8 | MXFP4


def quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """How the weights are stored by the parsed ``config.json``; None: plainly.

    Args:
        where: names the file in the errors

    Raises:
        ValueError: naming the field, for every other way of storing weights.
    """
    declared = config.get("quantization_config")
    if declared is None:
        if config.get("compression_config") is not None:
            raise ValueError(f"{where}: compression_config: {_ONLY} [RL3009]")
        return None
    if not isinstance(declared, Mapping):
        raise ValueError(
            f"{where}: quantization_config: expected an object, found {declared!r} [RL3009]"
        )
    method = declared.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise ValueError(f"{where}: quantization_config.quant_method={method!r}: {_ONLY} [RL3009]")
    fields = _FP8_FIELDS if method == "fp8" else _MXFP4_FIELDS
    for name in sorted((declared.keys() | fields.keys()) - _LISTS):
        value = declared.get(name)
        if name not in fields:
            raise ValueError(
                f"{where}: quantization_config.{name}={value!r} is not known for {method}, and it "
                "may change what the weights mean. Remove it if it does not"
                " [RL3009]"
            )
        if value not in fields[name]:
            wanted = " or ".join(repr(v) for v in fields[name] if v is not None)
            raise ValueError(
                f"{where}: quantization_config.{name}={value!r}: expected {wanted}. {_ONLY}"
                " [RL3009]"
            )
    return BlockFP8() if method == "fp8" else MXFP4()


_ONLY = (
    f"only FP8 in blocks of {BLOCK[0]} x {BLOCK[1]} (quant_method 'fp8') and MXFP4 (quant_method "
    "'mxfp4') are read; take the checkpoint in bf16, or convert it to bf16 first"
)
