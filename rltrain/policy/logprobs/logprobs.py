"""Log-probabilities and entropy of tokens, without all their logits at once.

The vocabulary is split over tensor-parallel ranks, and on each rank into blocks that fit into
memory. The backward pass recomputes the logits of each block (as cut cross-entropy does: Wijmans et
al., arXiv:2411.09009). The softmax of the first blocks is kept instead, as far as the memory budget
allows. Blocks split the vocabulary, not the tokens, so one product sums the gradient of a row of
the head over all tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.planning.policy_memory import BLOCK
from rltrain.policy.logprobs.online_softmax import (
    SoftmaxState,
    Weights,
    backward,
    init_state,
    over_ranks,
    update,
)

TILE = 128


@dataclass(frozen=True)
class Vocabulary:
    """How a rank's logits become log-probabilities."""

    size: int
    """Ids at or past it are padding of the embedding and get no probability."""
    rank: int = 0
    """The number of this rank's slice of the vocabulary."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold all slices; None if there is one slice."""
    temperature: float = 1.0
    fp32: bool = True
    """Whether logits are summed and returned in fp32, else in the dtype of the head's weight."""
    kept_bytes: int = 0
    """How much of a rank's softmax is kept for the backward pass, in place of recomputation."""

    def local_targets(self, targets: Tensor, width: int) -> tuple[Tensor, int]:
        """Targets as columns of this rank's slice, and how many of its columns are not padding."""
        first = self.rank * width
        return targets - first, max(0, min(width, self.size - first))


def logprobs_of_hidden(
    hidden: Tensor, head: Tensor, targets: Tensor, vocabulary: Vocabulary, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden head^T / temperature)[target] and the entropy, both differentiable.

    The gradient of ``hidden`` is that of this rank's slice, to be summed over the group.

    Args:
        hidden: what the head reads  # [S, H]
        head: this rank's rows of it  # [V / tp, H]
        targets: token ids; rows whose result is not read may hold any valid id  # [S]
        block: number of logits to hold at once

    Returns:
        float32  # [S], [S]
    """
    if not torch.is_grad_enabled():
        vocabulary = replace(vocabulary, kept_bytes=0)
    logprobs, entropy = _OfHidden.apply(hidden, head, targets, vocabulary, block)
    return logprobs, entropy


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """As `logprobs_of_hidden`, from logits, which are not changed.

    Args:
        logits: this rank's slice of the vocabulary  # [S, V / tp]
    """
    logprobs, entropy = _OfLogits.apply(logits, targets, vocabulary)
    return logprobs, entropy


class _OfHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, vocabulary: Vocabulary, block: int
    ) -> tuple[Tensor, Tensor]:
        local, real = vocabulary.local_targets(targets, len(head))
        ctx.blocks = _blocks(real, block // max(1, len(hidden)))
        ctx.grad_dtype = _grad_dtype(hidden, vocabulary.fp32)
        update_state, _ = _functions(hidden.device)
        state, left = init_state(local), vocabulary.kept_bytes
        ctx.kept = []
        for rows in ctx.blocks:
            logits = _logits(hidden, head[rows], vocabulary.fp32)
            nbytes = logits.numel() * ctx.grad_dtype.itemsize
            values = torch.empty_like(logits, dtype=ctx.grad_dtype) if nbytes <= left else None
            state = update_state(state, logits, local - rows.start, vocabulary.temperature, values)
            left = 0 if values is None else left - nbytes
            ctx.kept.append(None if values is None else Weights(values, state[0]))
        logprobs, *softmax = over_ranks(state, vocabulary.group)
        ctx.set_materialize_grads(False)  # None means that an output is not used
        ctx.save_for_backward(hidden, head, local, *softmax)
        ctx.vocabulary = vocabulary
        return logprobs, softmax[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, local, *softmax = ctx.saved_tensors
        fp32, temperature = ctx.vocabulary.fp32, ctx.vocabulary.temperature
        _, block_gradient = _functions(hidden.device)
        dense = _dense(grads, local)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        # The loss keeps ctx alive after this pass, so ctx must not keep the weights.
        all_kept, ctx.kept = ctx.kept, [None] * len(ctx.blocks)
        for rows, kept in zip(ctx.blocks, all_kept, strict=True):
            block = _logits(hidden, head[rows], fp32) if kept is None else kept
            column = local - rows.start
            grad = block_gradient(block, column, softmax, dense, temperature, ctx.grad_dtype)
            _add_product(grad_hidden, grad, head[rows])
            if grad_head is not None:
                grad_head[rows] = _product(grad.t(), hidden)
        return grad_hidden.to(hidden.dtype), grad_head, None, None, None


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        local, real = vocabulary.local_targets(targets, logits.shape[1])
        state = init_state(local)
        if real:
            state = update(state, logits[:, :real], local, vocabulary.temperature)
        logprobs, *softmax = over_ranks(state, vocabulary.group)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, *softmax)
        ctx.real, ctx.temperature = real, vocabulary.temperature
        return logprobs, softmax[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local, *softmax = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        real = logits[:, : ctx.real]
        dense = _dense(grads, local)
        grad[:, : ctx.real] = backward(real, local, softmax, dense, ctx.temperature, logits.dtype)
        return grad, None, None


def _blocks(width: int, max_size: int) -> list[slice]:
    """Slices of the logits' columns or the head's rows: whole tiles where one fits."""
    size = max(1, max_size - max_size % TILE if max_size > TILE else max_size)
    return [slice(start, min(start + size, width)) for start in range(0, width, size)]


def _grad_dtype(hidden: Tensor, fp32: bool) -> torch.dtype:
    """The dtype of the logits' gradient.

    On a GPU it is that of the model's other gradients: a product in fp32 costs as much as ten in
    bf16 there.
    """
    return torch.float32 if fp32 and not hidden.is_cuda else hidden.dtype


def _logits(hidden: Tensor, rows: Tensor, fp32: bool) -> Tensor:
    return _product(hidden, rows.t()) if fp32 else hidden @ rows.t()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, summed in fp32. Products of two bf16 numbers are exact in fp32."""
    if _sums_bf16_in_fp32(a, b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed as in `_product`."""
    if _sums_bf16_in_fp32(a, b):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a.float() @ b.float()


def _sums_bf16_in_fp32(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype == torch.bfloat16


def _functions(device: torch.device) -> tuple[Callable[..., SoftmaxState], Callable[..., Tensor]]:
    """`update` and `backward`; on a GPU the versions that run one kernel in place of ten."""
    if device.type != "cuda":
        return update, backward
    # Imported here: it needs triton, which an installation for CPUs lacks.
    from rltrain.policy.logprobs import softmax_kernels

    return softmax_kernels.update_by_kernel, softmax_kernels.backward_by_kernel


def _dense(grads: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of log-probability and entropy; zeros for an output that is not used."""
    grad_logprob, grad_entropy = (
        torch.zeros_like(like, dtype=torch.float32) if grad is None else grad for grad in grads
    )
    return grad_logprob, grad_entropy
