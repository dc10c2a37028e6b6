"""Weights in FP8 blocks and in MXFP4: quantised, and read in slices as plain tensors. Pure.

FP8 blocks are DeepSeek-V3's (https://arxiv.org/abs/2412.19437, section 3.3; vLLM's
``per_block_cast_to_fp8``): a value is its e4m3 number times the scale of its block. MXFP4 is the
OCP Microscaling format (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf):
32 values in e2m1 share a power of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.weights.architecture.quantization_config import BLOCK, BlockFP8, Quantization

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MXFP4_BLOCK = 32
_SMALLEST_MAX = 1e-4
"""Lower limit of a block's largest value, as in vLLM: a block of zeros has a finite scale."""
# The value of each byte. A NumPy look-up is several times faster than a torch cast on a CPU.
_BYTES = torch.arange(256, dtype=torch.uint8)
_E4M3 = _BYTES.view(FP8).float().numpy()
# Four bits of e2m1 are a sign, two of exponent, one of mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])
_TWO_E2M1 = torch.stack([_E2M1[_BYTES.int() & 0x0F], _E2M1[_BYTES.int() >> 4]], dim=1).numpy()
"""The low four bits come first."""


def quantize_fp8(tensor: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """``tensor`` ``[R, C]`` in FP8, and fp32 ``[ceil(R/r), ceil(C/c)]`` to multiply blocks with.

    The largest value of a block becomes the largest e4m3 number. Blocks at the end are ragged.
    """
    rows, columns = tensor.shape
    grid = scale_shape(tensor.shape, block)
    padded = tensor.new_zeros(grid[0] * block[0], grid[1] * block[1], dtype=torch.float32)
    padded[:rows, :columns] = tensor
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=_SMALLEST_MAX)
    scale = largest / FP8_MAX
    quantized = blocks.mul_(1.0 / scale).to(FP8).view_as(padded)  # `padded` is our own copy
    return quantized[:rows, :columns].contiguous(), scale.view(grid)


def scale_shape(shape: Sequence[int], block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    """The shape of the scales of a tensor ``[.., R, C]``."""
    *lead, rows, columns = shape
    return (*lead, -(-rows // block[0]), -(-columns // block[1]))


class SliceReader(Protocol):
    """Reads slices of a tensor in a file; what ``safe_open(..).get_slice`` returns."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True)
class BlockFP8Tensor:
    """FP8 numbers ``[.., R, C]`` and the scales of their blocks, together the fp32 tensor."""

    values: SliceReader
    scale: SliceReader
    block: tuple[int, int] = BLOCK

    def get_shape(self) -> list[int]:
        return self.values.get_shape()

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        lead, rows, columns = _last_two(index, self.get_shape())
        values = _look_up(_E4M3, self.values[(*lead, rows, columns)].view(torch.uint8))
        height, width = self.block
        scale = self.scale[(*lead, _blocks(rows, height), _blocks(columns, width))].float()
        scale = scale.repeat_interleave(width, -1)
        scale = scale.narrow(-1, columns.start % width, columns.stop - columns.start)
        for number in range(scale.shape[-2]):  # no tensor of the size of `values` besides
            start = max(number * height - rows.start % height, 0)
            stop = (number + 1) * height - rows.start % height
            values[..., start:stop, :].mul_(scale[..., number : number + 1, :])
        return values


@dataclass(frozen=True)
class MXFP4Tensor:
    """Blocks ``[E, C, R / 32, 16]`` and scales ``[E, C, R / 32]``, together fp32 ``[E, R, C]``."""

    blocks: SliceReader
    scales: SliceReader

    def get_shape(self) -> list[int]:
        experts, columns, groups, _ = self.blocks.get_shape()
        return [experts, groups * MXFP4_BLOCK, columns]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        lead, rows, columns = _last_two(index, self.get_shape())
        stored = (*lead, columns, _blocks(rows, MXFP4_BLOCK))
        values = unpack_mxfp4(self.blocks[stored], self.scales[stored]).transpose(-1, -2)
        return values.narrow(-2, rows.start % MXFP4_BLOCK, rows.stop - rows.start)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 ``[.., n, 16]`` and ``[.., n]`` -> fp32 ``[.., 32 n]``."""
    values = _look_up(_TWO_E2M1, blocks).flatten(-2)
    values *= scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    return values.flatten(-2)


def _look_up(table: NDArray[np.float32], index: Tensor) -> Tensor:
    return torch.from_numpy(np.take(table, index.numpy(), axis=0))


def quantized_suffixes(quantization: Quantization) -> tuple[str, str]:
    """Name suffixes of the two tensors that store a quantised one."""
    return ("", "_scale_inv") if isinstance(quantization, BlockFP8) else ("_blocks", "_scales")


def _last_two(index: Any, shape: Sequence[int]) -> tuple[tuple[Any, ...], slice, slice]:
    """``index``, which may omit trailing dims, with bounded slices for the last two."""
    indices = index if isinstance(index, tuple) else (index,)
    full = [*indices, *[slice(None)] * (len(shape) - len(indices))]
    rows, columns = (slice(*s.indices(n)[:2]) for s, n in zip(full[-2:], shape[-2:], strict=True))
    return tuple(full[:-2]), rows, columns


def _blocks(part: slice, size: int) -> slice:
    """The blocks that hold ``part``."""
    return slice(part.start // size, -(-part.stop // size))
