"""The deferred head on a GPU, by its kernels and in several blocks, against its formula in float64.

    python tests/gpu/test_deferred_head.py        # where there is no pytest

With bf16 parameters forward products are exact, and what is left is the rounding of fp32 sums;
gradients are rounded to bf16 once more, as every gradient of the model is. With fp32 parameters
products are rounded too. That affects the entropy most, which is a difference of larger numbers.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from rltrain.policy.logprobs.logprobs import Vocabulary, logprobs_of_hidden

SLOTS, HIDDEN, REAL, PADDED = 1000, 256, 5003, 5008
BF16, FP32 = torch.bfloat16, torch.float32
# Of the largest entry: log-probabilities and entropy, gradients.
CASES: dict[str, tuple[torch.dtype, bool, float, float]] = {
    "fp32 head, bf16 parameters": (BF16, True, 2e-6, 6e-3),
    "bf16 head": (BF16, False, 2e-2, 3e-2),
    "fp32 head, fp32 parameters": (FP32, True, 3e-6, 5e-6),
}


def errors(dtype: torch.dtype, fp32: bool, block: int, kept_bytes: int) -> dict[str, float]:
    """Of log-probability, entropy, and the gradients of hidden states and head."""
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(SLOTS, HIDDEN, generator=draw, device="cuda").to(dtype)
    head = (torch.randn(PADDED, HIDDEN, generator=draw, device="cuda") / 4).to(dtype)
    targets = torch.randint(REAL, (SLOTS,), generator=draw, device="cuda")
    weights = torch.randn(SLOTS, generator=draw, device="cuda")
    vocabulary = Vocabulary(REAL, temperature=0.8, fp32=fp32, kept_bytes=kept_bytes)

    def run(hidden: Tensor, head: Tensor) -> list[Tensor]:
        if hidden.dtype == torch.float64:
            scores = (hidden @ head.t()[:, :REAL] / 0.8).log_softmax(1)
            logprobs = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
            entropy = -(scores.exp() * scores).sum(1)
        else:
            logprobs, entropy = logprobs_of_hidden(hidden, head, targets, vocabulary, block)
        loss = (weights * logprobs).sum() + 0.1 * entropy.sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, (hidden, head))]

    ours = run(hidden.requires_grad_(), head.requires_grad_())
    theirs = run(hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_())
    names = ("logprobs", "entropy", "of hidden", "of head")
    found = {
        name: float((a.double() - b).abs().max() / b.abs().max())
        for name, a, b in zip(names, ours, theirs, strict=True)
    }
    assert not ours[3][REAL:].any(), "rows that pad the vocabulary moved"
    return found


def check(case: str) -> None:
    dtype, fp32, of_outputs, of_gradients = CASES[case]
    half = SLOTS * REAL * dtype.itemsize // 2
    # One block, eight, and more than a thousand; none, some and all of them kept.
    for block, kept in product((2**27, 700 * SLOTS, 4096), (0, half, 2**30)):
        found = errors(dtype, fp32, block, kept)
        sys.stdout.write(f"{case}, block of {block}, {kept} bytes kept: {found}\n")
        assert found["logprobs"] < of_outputs and found["entropy"] < of_outputs, found
        assert found["of hidden"] < of_gradients and found["of head"] < of_gradients, found


def peak_memory() -> tuple[float, float]:
    """GiB that a pass over 8,192 tokens and 150,000 words adds at most; all logits in fp32."""
    hidden = torch.randn(8192, 512, device="cuda", dtype=BF16).requires_grad_()
    head = torch.randn(150_000, 512, device="cuda", dtype=BF16).requires_grad_()
    targets = torch.randint(150_000, (8192,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    vocabulary = replace(Vocabulary(150_000), temperature=1.0)
    logprobs, entropy = logprobs_of_hidden(hidden, head, targets, vocabulary)
    (logprobs.sum() - 0.01 * entropy.sum()).backward()
    return (torch.cuda.max_memory_allocated() - before) / 2**30, 8192 * 150_000 * 4 / 2**30


def check_memory() -> None:
    peak, whole = peak_memory()
    sys.stdout.write(f"peak {peak:.2f} GiB, all logits in fp32 {whole:.2f} GiB\n")
    assert peak < whole / 2


if __name__ == "__main__":
    for name in CASES:
        check(name)
    check_memory()
else:
    import pytest

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("case", CASES)
    def test_equals_the_formula_in_float64(case: str) -> None:
        check(case)

    def test_no_tensor_holds_all_logits() -> None:
        check_memory()
