"""Where two sets of routes of the same tokens differ, and whether a near-tie explains it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.routing.agreement import num_shared
from rltrain.routing.codec import decode
from rltrain.verification.routes_file import Routes


@dataclass(frozen=True)
class FirstDifference:
    """The first row of a sample that differs, and the lowest layer in which it does."""

    sample: int
    row: int  # within the sample
    layer: int
    token: int  # what the row reads
    actual: tuple[int, ...]
    expected: tuple[int, ...]
    margin: float | None  # of the choice; None where neither side knows it
    is_near_tie: bool


@dataclass(frozen=True)
class LayerDifference:
    """Over the rows that both sides captured."""

    layer: int
    overlap: float  # experts that both chose / K
    differing: int  # rows in which the sets of experts differ
    near_ties: int  # of those, rows whose margin is within the tolerance
    unexplained: int  # of those, rows that neither a near-tie nor an earlier difference explains


@dataclass(frozen=True)
class Difference:
    num_rows: int  # captured on both sides
    num_unmatched: int  # captured on one side alone
    layers: tuple[LayerDifference, ...]
    firsts: tuple[FirstDifference, ...]  # of the samples that differ

    @property
    def unexplained(self) -> int:
        return sum(layer.unexplained for layer in self.layers)


def compare_routes(actual: Routes, expected: Routes, near_tie: float) -> Difference:
    """Compare row by row; the order of the experts in a row does not matter.

    A row's output is read by the layers above it, in the same row and in all later rows of its
    sample. So a difference may follow from another one in a lower layer, in the same row or an
    earlier one. Any other difference is a near-tie or a mistake.

    Args:
        near_tie: the largest margin (`rltrain.routing.agreement.choice_margin`) that rounding can
            bridge; without margins on either side there are no near-ties

    Raises:
        ValueError: they are of other tokens or another model, or have no row in common.
    """
    _check_comparable(actual, expected)
    both = actual.route_mask & expected.route_mask
    if not both.any():
        raise ValueError("no row was captured on both sides: there is nothing to compare [RL7004]")
    k = actual.ids.shape[2]
    shared = num_shared(decode(actual.ids), decode(expected.ids))  # [N, L]
    differs = (shared < k) & both.unsqueeze(1)
    margins = _margins(actual, expected)
    ties = torch.zeros_like(differs) if margins is None else differs & (margins <= near_tie)
    unexplained = differs & ~ties & ~_follows(differs, actual.seq_lens)
    layers = tuple(
        LayerDifference(
            layer,
            overlap=float(shared[both, n].double().mean() / k),
            differing=int(differs[:, n].sum()),
            near_ties=int(ties[:, n].sum()),
            unexplained=int(unexplained[:, n].sum()),
        )
        for n, layer in enumerate(actual.layers)
    )
    firsts = _firsts(actual, expected, differs, ties, margins)
    unmatched = int((actual.route_mask ^ expected.route_mask).sum())
    return Difference(int(both.sum()), unmatched, layers, firsts)


def _check_comparable(actual: Routes, expected: Routes) -> None:
    same_tokens = torch.equal(actual.tokens, expected.tokens)
    if not same_tokens or not torch.equal(actual.seq_lens, expected.seq_lens):
        raise ValueError(
            f"the routes are of different tokens ({len(actual.seq_lens)} samples, "
            f"{len(actual.tokens)} tokens and {len(expected.seq_lens)} samples, "
            f"{len(expected.tokens)} tokens): record on the tokens of the other file"
            " [RL7004]"
        )
    models = [(r.layers, r.ids.shape[2], r.num_experts) for r in (actual, expected)]
    if models[0] != models[1]:
        raise ValueError(
            "the routes are of different models: layers, experts per token and experts are "
            f"{models[0]} and {models[1]}"
            " [RL7004]"
        )


def _margins(actual: Routes, expected: Routes) -> Tensor | None:
    known = [r.margins for r in (actual, expected) if r.margins is not None]
    return torch.stack(known).amin(0) if known else None


def _follows(differs: Tensor, seq_lens: Tensor) -> Tensor:
    """There is a difference in a lower layer, in the same row or an earlier one.  # [N, L]"""
    parts = []
    for sample in differs.split(seq_lens.tolist()):
        so_far = sample.int().cummax(0).values
        parts.append((so_far.cumsum(1) - so_far) > 0)
    return torch.cat(parts)


def _firsts(
    actual: Routes, expected: Routes, differs: Tensor, ties: Tensor, margins: Tensor | None
) -> tuple[FirstDifference, ...]:
    firsts = []
    start = 0
    for sample, length in enumerate(actual.seq_lens.tolist()):
        rows = differs[start : start + length].any(1).nonzero()
        if len(rows):
            index = start + int(rows[0])
            n = int(differs[index].int().argmax())
            firsts.append(
                FirstDifference(
                    sample,
                    index - start,
                    actual.layers[n],
                    int(actual.tokens[index]),
                    tuple(decode(actual.ids[index, n]).tolist()),
                    tuple(decode(expected.ids[index, n]).tolist()),
                    None if margins is None else float(margins[index, n]),
                    bool(ties[index, n]),
                )
            )
        start += length
    return tuple(firsts)
