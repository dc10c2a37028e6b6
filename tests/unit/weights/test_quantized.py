"""FP8 in blocks and MXFP4 against formulas in NumPy and transformers; slices against the whole."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from rltrain.weights.huggingface.quantized import (
    FP8_MAX,
    BlockFP8Tensor,
    MXFP4Tensor,
    quantize_fp8,
    scale_shape,
    unpack_mxfp4,
)

SIZES = st.integers(1, 300)


@dataclass
class InMemory:
    """A tensor where a file's would be; it counts the elements that are read."""

    tensor: Tensor
    num_read: int = 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return ""

    def __getitem__(self, index: Any) -> Tensor:
        found = self.tensor[index]
        self.num_read += found.numel()
        return found


def e4m3() -> NDArray[np.float64]:
    """The 127 finite numbers of that format that are not negative, by their seven bits."""
    exponent, mantissa = np.divmod(np.arange(127), 8)
    small = mantissa / 8 * 2.0**-6
    return np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def round_to_e4m3(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest number of the format, the one with an even last bit at a tie."""
    numbers = e4m3()
    size = np.abs(values.astype(np.float64))
    upper = np.searchsorted(numbers, size).clip(1, len(numbers) - 1)
    lower = upper - 1
    above, below = numbers[upper] - size, size - numbers[lower]
    up = (above < below) | ((above == below) & (upper % 2 == 0))
    found = np.where(up, numbers[upper], numbers[lower])
    return np.copysign(found, values).astype(np.float32)


def random_tensor(*shape: int) -> Tensor:
    """Rows of very different sizes, and one row of zeros."""
    values = torch.randn(shape) * torch.logspace(-5, 3, shape[-2]).unsqueeze(-1)
    values[..., 0, :] = 0
    return values


def stored_fp8(tensor: Tensor) -> tuple[InMemory, InMemory]:
    """Each matrix of ``[.., R, C]`` on its own."""
    pairs = [quantize_fp8(matrix) for matrix in tensor.reshape(-1, *tensor.shape[-2:])]
    values, scale = (torch.stack(list(part)) for part in zip(*pairs, strict=True))
    grid = scale_shape(tensor.shape)
    return InMemory(values.view(tensor.shape)), InMemory(scale.view(grid))


@given(rows=SIZES, columns=SIZES)
def test_a_block_is_rounded_to_the_numbers_of_its_scale(rows: int, columns: int) -> None:
    tensor = random_tensor(rows, columns)
    values, scale = quantize_fp8(tensor)
    assert values.shape == tensor.shape and values.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-rows // 128), -(-columns // 128)) and scale.dtype == torch.float32
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = tensor[part].numpy()
            factor = np.float32(max(np.abs(block).max(), np.float32(1e-4)) / np.float32(448))
            assert scale[i, j].item() == factor
            expected = round_to_e4m3(block * (np.float32(1) / factor))
            assert np.array_equal(values[part].float().numpy(), expected)


def test_what_is_read_back_is_near_and_as_transformers_reads_it() -> None:
    tensor = random_tensor(256, 384)
    values, scale = stored_fp8(tensor)
    found = BlockFP8Tensor(values, scale)[:]
    largest = tensor.abs().view(2, 128, 3, 128).amax(dim=(1, 3))
    bound = (largest / 2**4).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert ((found - tensor).abs() <= bound).all()  # half of the widest gap between two numbers
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    theirs = Fp8Dequantize(FineGrainedFP8HfQuantizer(config))
    assert torch.equal(found, theirs._dequantize_one(values.tensor, scale.tensor, torch.float32))
    assert found.abs().max() == scale.tensor.max() * FP8_MAX


@given(data=st.data(), lead=st.sampled_from([(), (3,)]), rows=SIZES, columns=SIZES)
def test_a_slice_is_that_of_the_whole(
    data: st.DataObject, lead: tuple[int, ...], rows: int, columns: int
) -> None:
    values, scale = stored_fp8(random_tensor(*lead, rows, columns))
    grown = scale.tensor.repeat_interleave(128, -2).repeat_interleave(128, -1)
    whole = values.tensor.float() * grown[..., :rows, :columns]
    index: list[Any] = [1 for _ in lead]
    for size in (rows, columns):
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start, size))))
    for given_dims in range(len(index), len(lead), -1):
        part = tuple(index[:given_dims])
        values.num_read = 0
        found = BlockFP8Tensor(values, scale)[part]
        assert torch.equal(found, whole[part])
        assert values.num_read == found.numel()


def test_only_the_scales_of_the_blocks_that_are_read() -> None:
    values, scale = stored_fp8(random_tensor(512, 640))
    assert BlockFP8Tensor(values, scale)[128:300].shape == (172, 640)
    assert scale.num_read == 2 * 5


def packed(experts: int, columns: int, groups: int) -> tuple[InMemory, InMemory]:
    blocks = torch.randint(256, (experts, columns, groups, 16), dtype=torch.uint8)
    scales = torch.randint(90, 150, (experts, columns, groups), dtype=torch.uint8)
    return InMemory(blocks), InMemory(scales)


@given(experts=st.integers(1, 3), columns=st.integers(1, 40), groups=st.integers(1, 4))
def test_mxfp4_is_what_transformers_reads(experts: int, columns: int, groups: int) -> None:
    blocks, scales = packed(experts, columns, groups)
    found = MXFP4Tensor(blocks, scales)
    theirs = convert_moe_packed_tensors(blocks.tensor, scales.tensor, dtype=torch.float32)
    assert found.get_shape() == list(theirs.shape) == [experts, 32 * groups, columns]
    assert torch.equal(found[:], theirs)
    assert torch.equal(found[experts - 1, 5 : 32 * groups - 3], theirs[-1, 5 : 32 * groups - 3])
    blocks.num_read = 0
    assert torch.equal(found[0, 1:32, 0:1], theirs[0, 1:32, 0:1])
    assert blocks.num_read == 16


def test_mxfp4_by_the_formula_of_the_standard() -> None:
    """Sign, two bits of exponent (bias 1), one of mantissa; the scale is 2 ** (byte - 127)."""
    code = np.arange(16)
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    numbers = np.where(sign == 1, -size, size)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.tensor([0, 1, 126, 127, 128, 200, 251, 252, 130, 60, 99, 7, 3, 2, 180, 90])
    found = unpack_mxfp4(blocks, scales.to(torch.uint8)).view(16, 16, 2).double().numpy()
    factor = 2.0 ** (scales.double().numpy() - 127)[:, None]
    assert np.array_equal(found[..., 0], numbers[blocks.numpy() & 15] * factor)
    assert np.array_equal(found[..., 1], numbers[blocks.numpy() >> 4] * factor)
    not_a_number = torch.tensor([255] * 16, dtype=torch.uint8)
    assert unpack_mxfp4(blocks, not_a_number).isnan().all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 257), (3, 500, 40)])
def test_scale_shapes(shape: tuple[int, ...]) -> None:
    rows, columns = shape[-2:]
    assert scale_shape(shape) == (*shape[:-2], (rows + 127) // 128, (columns + 127) // 128)
