"""`rltrain.policy.logprobs.online_softmax` as GPU kernels, which read every logit once.

Arguments and results are those of `online_softmax.update` and `online_softmax.backward`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rltrain.policy.logprobs.online_softmax import LOWEST, TINY, SoftmaxState, Weights

LANES = 1024
"""Columns of a row that a program holds at once."""


def update_by_kernel(
    state: SoftmaxState,
    logits: Tensor,
    local: Tensor,
    temperature: float,
    weights: Tensor | None = None,
) -> SoftmaxState:
    """One program per row: a running softmax in each lane, combined at the end.

    To write weights, the program reads its row a second time, from a nearer cache.
    """
    rows, width = logits.shape
    assert logits.stride(1) == 1 and (weights is None or weights.is_contiguous())
    result = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _update[(rows,)](
            *(values.contiguous() for values in state),
            logits,
            local,
            result,
            result if weights is None else weights,
            rows,
            width,
            logits.stride(0),
            1 / temperature,
            LOWEST,
            weights is not None,
            LANES,
        )
    peak, total, expected, chosen = result.unbind()
    return peak, total, expected, chosen


def backward_by_kernel(
    block: Tensor | Weights,
    local: Tensor,
    softmax: Sequence[Tensor],
    grads: tuple[Tensor, Tensor],
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """One program per ``LANES`` columns of a row."""
    values = block.values if isinstance(block, Weights) else block
    rows, width = values.shape
    assert values.stride(1) == 1
    grad = torch.empty(rows, width, dtype=dtype, device=values.device)
    if rows and width:
        _backward[(rows, triton.cdiv(width, LANES))](
            values,
            block.peak if isinstance(block, Weights) else local,
            local,
            *(tensor.contiguous() for tensor in (*softmax, *grads)),
            grad,
            width,
            values.stride(0),
            1 / temperature,
            TINY,
            isinstance(block, Weights),
            LANES,
        )
    return grad


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    peak_in,
    total_in,
    expected_in,
    chosen_in,
    logits,
    local,
    result,
    weights,
    rows,
    width,
    stride,
    scale,
    lowest,
    HAS_WEIGHTS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, LANES)
    peak = tl.full((LANES,), lowest, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    expected = tl.zeros((LANES,), tl.float32)
    for start in range(0, width, LANES):
        inside = start + lanes < width
        score = tl.load(logits + start + lanes, mask=inside, other=0.0).to(tl.float32) * scale
        higher = tl.where(inside, tl.maximum(peak, score), peak)
        lower = peak - higher
        shrunk = tl.exp(lower)
        shifted = tl.where(inside, score - higher, 0.0)
        weight = tl.where(inside, tl.exp(shifted), 0.0)
        expected = (expected + total * lower) * shrunk + weight * shifted
        total = total * shrunk + weight
        peak = higher
    before = tl.load(peak_in + row)
    top = tl.maximum(tl.max(peak, 0), before)
    lower = peak - top
    shrunk = tl.exp(lower)
    expected = tl.sum((expected + total * lower) * shrunk, 0)
    total = tl.sum(total * shrunk, 0)
    lower_before = before - top
    shrunk_before = tl.exp(lower_before)
    total_before = tl.load(total_in + row)
    expected_before = tl.load(expected_in + row)
    total += total_before * shrunk_before
    expected += (expected_before + total_before * lower_before) * shrunk_before
    column = tl.load(local + row)
    is_here = (column >= 0) & (column < width)
    chosen = tl.load(logits + column, mask=is_here, other=0.0).to(tl.float32) * scale
    tl.store(result + row, top)
    tl.store(result + rows + row, total)
    tl.store(result + 2 * rows + row, expected)
    tl.store(result + 3 * rows + row, tl.load(chosen_in + row) + chosen)
    if HAS_WEIGHTS:
        weights += row * width
        for start in range(0, width, LANES):
            inside = start + lanes < width
            score = tl.load(logits + start + lanes, mask=inside, other=0.0).to(tl.float32) * scale
            weight = tl.exp(score - top).to(weights.dtype.element_ty)
            tl.store(weights + start + lanes, weight, mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    values,
    block_peak,
    local,
    peak,
    log_total,
    entropy,
    grad_logprob,
    grad_entropy,
    grad_out,
    width,
    stride,
    scale,
    tiny,
    ARE_WEIGHTS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = columns < width
    value = tl.load(values + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ARE_WEIGHTS:
        score = tl.log(tl.maximum(value, tiny)) + tl.load(block_peak + row)
    else:
        score = value * scale
    log_p = score - tl.load(peak + row) - tl.load(log_total + row)
    to_logprob = tl.load(grad_logprob + row)
    to_entropy = tl.load(grad_entropy + row)
    grad = tl.where(columns == tl.load(local + row), to_logprob, 0.0)
    grad -= tl.exp(log_p) * (to_logprob + to_entropy * (log_p + tl.load(entropy + row)))
    tl.store(
        grad_out + row * width + columns, (grad * scale).to(grad_out.dtype.element_ty), mask=inside
    )
