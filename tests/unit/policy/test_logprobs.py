"""Log-probabilities and entropy of hidden states; tests/distributed has a split vocabulary."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.policy.logprobs import logprobs as module
from rltrain.policy.logprobs.logprobs import Vocabulary, logprobs_of_hidden, logprobs_of_logits

SLOTS, HIDDEN, REAL, PADDED = 6, 5, 11, 12
TEMPERATURE = 0.7


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SLOTS, HIDDEN, generator=generator)
    head = 3 * torch.randn(PADDED, HIDDEN, generator=generator)
    return hidden, head, torch.tensor([0, 10, 3, 3, 4, 7])


def expected(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    scores = (logits[:, :REAL] / TEMPERATURE).log_softmax(1)
    return scores.gather(1, targets.unsqueeze(1)).squeeze(1), -(scores.exp() * scores).sum(1)


def gradients(found: tuple[Tensor, Tensor], entropy_coef: float, *of: Tensor) -> list[Tensor]:
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0])
    loss = (weights * found[0]).sum() + (entropy_coef * found[1].sum() if entropy_coef else 0.0)
    return list(torch.autograd.grad(loss, of))


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("kept_columns", (0, 7, 1000))
@pytest.mark.parametrize("entropy_coef", (0.3, 0.0))
@pytest.mark.parametrize("per_block", (1, 2, 5, 100))
def test_equal_the_formula_in_float64_with_their_gradients(
    per_block: int, entropy_coef: float, kept_columns: int
) -> None:
    """However many rows of the head a block has, the last one fewer, and however much is kept."""
    hidden, head, targets = draw()
    h, w = (x.double().requires_grad_() for x in (hidden, head))
    theirs = expected(h @ w.t(), targets)
    hidden.requires_grad_()
    head.requires_grad_()
    kept = kept_columns * SLOTS * 4
    vocabulary = Vocabulary(REAL, temperature=TEMPERATURE, kept_bytes=kept)
    ours = logprobs_of_hidden(hidden, head, targets, vocabulary, block=per_block * SLOTS)
    found = [*ours, *gradients(ours, entropy_coef, hidden, head)]
    close(found, [*theirs, *gradients(theirs, entropy_coef, h, w)])
    assert not found[3][REAL:].any(), "rows that pad the vocabulary moved"


@pytest.mark.parametrize("num_kept", (0, 1, 2, 3))
def test_blocks_are_no_larger_than_may_be_held_and_what_is_kept_is_not_made_again(
    num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, targets = (x.requires_grad_(x.is_floating_point()) for x in draw())
    seen: list[Tensor] = []
    made = module._logits

    def keeping(*given: Any) -> Tensor:
        seen.append(made(*given))
        return seen[-1]

    monkeypatch.setattr(module, "_logits", keeping)
    vocabulary = Vocabulary(REAL, kept_bytes=num_kept * 4 * SLOTS * 4)
    found = logprobs_of_hidden(hidden, head, targets, vocabulary, block=4 * SLOTS)
    found[0].sum().backward()
    blocks = [(SLOTS, 4), (SLOTS, 4), (SLOTS, 3)]
    assert [x.shape for x in seen] == [*blocks, *blocks[num_kept:]]


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets = draw()
    hidden.requires_grad_()
    logprobs_of_hidden(hidden, head, targets, Vocabulary(REAL))[0].sum().backward()
    assert head.grad is None and hidden.grad is not None and hidden.grad.any()


def test_bf16_is_multiplied_in_fp32_or_in_itself() -> None:
    hidden, head, targets = draw()
    hidden, head = hidden.bfloat16(), head.bfloat16()
    for fp32, logits in ((True, hidden.float() @ head.float().t()), (False, hidden @ head.t())):
        vocabulary = Vocabulary(REAL, temperature=TEMPERATURE, fp32=fp32)
        ours = logprobs_of_hidden(hidden, head, targets, vocabulary)
        close(ours, expected(logits.double(), targets))


def test_logits_that_are_there_equal_the_formula_and_are_left_as_they_were() -> None:
    """Megatron's own cross entropy overwrites fp32 logits, and what is read from them next."""
    hidden, head, targets = draw()
    logits = (hidden @ head.t()).requires_grad_()
    given = logits.detach().clone()
    exact = given.double().requires_grad_()
    ours = logprobs_of_logits(logits, targets, Vocabulary(REAL, temperature=TEMPERATURE))
    theirs = expected(exact, targets)
    close([*ours, *gradients(ours, 0.3, logits)], [*theirs, *gradients(theirs, 0.3, exact)])
    assert torch.equal(given, logits)
