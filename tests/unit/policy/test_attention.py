"""Packed attention equals attention of each sequence alone, whichever way it is computed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.parallel.token_layout import TokenGrid, context_parallel_slice
from rltrain.policy.torch_backend.attention import packed_causal_attention


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Written out: [t, heads, d] of one sequence. [t, heads * d_value]"""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    past = torch.ones(scores.shape[1:]).tril(-(window or len(key))).bool()
    scores = scores.masked_fill(future | past, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], dim=2)
    probs = scores.softmax(-1)[:, :, : len(key)]
    return torch.einsum("hqk,khd->qhd", probs, value).flatten(1)


# Padded to one call, and one call each: 1300 is long enough that padding 5 others to it costs more.
@pytest.mark.parametrize("lengths", [[5], [3, 1, 9, 4], [1300, 2, 3, 1, 1, 2]])
@pytest.mark.parametrize(
    ("value_size", "window", "with_sinks"),
    [(8, None, False), (6, None, False), (8, 3, False), (8, None, True), (6, 3, True)],
)
def test_equals_separate_sequences(
    lengths: list[int], value_size: int, window: int | None, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8), (2, 8), (2, value_size)]
    inputs = [
        torch.randn(sum(lengths), *shape, generator=generator).requires_grad_() for shape in shapes
    ]
    weights = torch.randn(sum(lengths), 4 * value_size, generator=generator)
    sinks = torch.tensor([-1.0, 0.5, 3.0, 0.0], requires_grad=True) if with_sinks else None

    found = packed_causal_attention(*inputs, lengths, window=window, sinks=sinks)
    parts = list(zip(*(x.split(lengths) for x in inputs), strict=True))
    expected = torch.cat([plain(*part, window, sinks) for part in parts])
    inputs += [sinks] if sinks is not None else []
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    for a, b in zip(
        gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[4], [8, 4, 12], [1200, 4, 8]])
@pytest.mark.parametrize("options", [{}, {"window": 3, "sinks": torch.tensor([0.5, 3.0])}])
def test_a_share_of_the_queries_reads_all_keys(lengths: list[int], options: Any) -> None:
    """Context parallelism: each of two ranks has a front and a back chunk of every sequence."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(3))
    expected = packed_causal_attention(query, key, value, lengths, **options)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for rank in range(2):
        grid = TokenGrid(cp_size=2, cp_rank=rank)
        own = [context_parallel_slice(torch.arange(n), grid) for n in lengths]
        rows = torch.cat([places + start for places, start in zip(own, starts, strict=True)])
        found = packed_causal_attention(query[rows], key, value, lengths, torch.cat(own), **options)
        torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-5)
