"""Packed attention equals attention of each sequence alone, whichever way it is computed."""

import pytest
import torch
from torch import Tensor

from rltrain.parallel.tokens import TokenGrid, context_parallel_slice
from rltrain.policy.torch_attention import packed_causal_attention


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Written out: [t, heads, d] of one sequence. [t, heads * d_value]"""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    probs = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, value).flatten(1)


# Padded to one call, and one call each: 1300 is long enough that padding 5 others to it costs more.
@pytest.mark.parametrize("lengths", [[5], [3, 1, 9, 4], [1300, 2, 3, 1, 1, 2]])
@pytest.mark.parametrize("value_size", [8, 6])
def test_equals_separate_sequences(lengths: list[int], value_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8), (2, 8), (2, value_size)]
    inputs = [
        torch.randn(sum(lengths), *shape, generator=generator).requires_grad_() for shape in shapes
    ]
    weights = torch.randn(sum(lengths), 4 * value_size, generator=generator)

    found = packed_causal_attention(*inputs, lengths)
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    expected = torch.cat([plain(*part) for part in parts])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for a, b in zip(
        gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[4], [8, 4, 12], [1200, 4, 8]])
def test_a_share_of_the_queries_reads_all_keys(lengths: list[int]) -> None:
    """Context parallelism: each of two ranks has a front and a back chunk of every sequence."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(3))
    expected = packed_causal_attention(query, key, value, lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for rank in range(2):
        grid = TokenGrid(cp_size=2, cp_rank=rank)
        own = [context_parallel_slice(torch.arange(n), grid) for n in lengths]
        rows = torch.cat([places + start for places, start in zip(own, starts, strict=True)])
        found = packed_causal_attention(query[rows], key, value, lengths, torch.cat(own))
        torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-5)
