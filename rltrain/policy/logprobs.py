"""Log-probabilities and entropy over a vocabulary that is split across tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, *, vocab_size: int, rank: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """log softmax(logits)[target] and the entropy of each row, both differentiable.

    Args:
        logits: this rank's slice of the vocabulary  # [S, V / tp]
        targets: token ids; rows whose result nobody reads may hold any valid id  # [S]
        vocab_size: ids at or past it are padding of the embedding and get no probability
        rank: which slice this is
        group: the ranks that hold the other slices, None if this is all of it

    Returns:
        float32  # [S], [S]
    """
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, targets, vocab_size, rank, group)
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    """Every rank ends with the same numbers; its gradient is for its own slice of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, rank: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        # A copy even of fp32 logits: they are the caller's, and this one is changed in place.
        scores = logits.to(torch.float32, copy=True)
        width = scores.shape[1]
        first = rank * width
        scores[:, max(0, vocab_size - first) :] = -torch.inf
        peak = _reduced(scores.amax(-1), group, dist.ReduceOp.MAX)
        scores -= peak.unsqueeze(1)
        probs = scores.exp()
        total = _reduced(probs.sum(-1), group)
        probs /= total.unsqueeze(1)

        local = targets - first
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1).unsqueeze(1)
        chosen = torch.where(here, scores.gather(1, local).squeeze(1), 0.0)
        logprobs = _reduced(chosen, group) - total.log()
        # p * log p is 0 where p is 0, also where the score is -inf.
        expected = torch.where(probs > 0, probs * scores, 0.0).sum(-1)
        entropy = total.log() - _reduced(expected, group)

        ctx.set_materialize_grads(False)  # None tells that nothing was made of an output
        ctx.save_for_backward(probs, local, here, entropy)
        ctx.dtype = logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        grad_logprobs, grad_entropy = grads
        probs, local, here, entropy = ctx.saved_tensors
        grad = torch.zeros_like(probs)
        if grad_logprobs is not None:
            # d logprob / d logit_j = [j = target] - p_j
            grad -= probs * grad_logprobs.unsqueeze(1)
            grad.scatter_add_(1, local, torch.where(here, grad_logprobs, 0.0).unsqueeze(1))
        if grad_entropy is not None:
            # d entropy / d logit_j = -p_j (log p_j + entropy)
            log_p_term = torch.where(probs > 0, probs * (probs.log() + entropy.unsqueeze(1)), 0.0)
            grad -= log_p_term * grad_entropy.unsqueeze(1)
        return grad.to(ctx.dtype), None, None, None, None


def _reduced(values: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
    return values
