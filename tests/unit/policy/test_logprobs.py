"""Log-probabilities of a whole vocabulary; tests/distributed compares those of a split one."""

import torch
from torch import Tensor

from rltrain.policy.logprobs import vocab_parallel_logprobs

REAL, PADDED = 7, 8


def draw() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, PADDED, generator=generator)
    return logits, torch.tensor([0, 6, 3, 3, 1])


def expected(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits[:, :REAL].log_softmax(1)
    entropy = -(scores.exp() * scores).sum(1)
    return scores.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def test_equals_the_formula_and_its_gradient() -> None:
    logits, targets = draw()
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    gradients = []
    for compute in (
        lambda x: expected(x, targets),
        lambda x: vocab_parallel_logprobs(x, targets, vocab_size=REAL, rank=0, group=None),
    ):
        x = logits.clone().requires_grad_()
        logprobs, entropy = compute(x)
        (weights * logprobs + 0.3 * entropy).sum().backward()
        gradients.append((logprobs.detach(), entropy.detach(), x.grad))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_logits_are_left_as_they_were() -> None:
    """Megatron's own cross entropy overwrites fp32 logits, and what is read from them next."""
    logits, targets = draw()
    given = logits.clone()
    vocab_parallel_logprobs(given, targets, vocab_size=REAL, rank=0, group=None)
    assert torch.equal(given, logits)
