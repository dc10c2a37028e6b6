"""Ragged batches to test formulas with: drawn at random, and the rare ones by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import example, settings
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Sequences end to end. ``mask`` marks response tokens of scored responses."""

    seq_lens: tuple[int, ...]
    mask: tuple[bool, ...]
    groups: tuple[int, ...]
    rewards: tuple[float, ...]
    seed: int = 0

    def noise(self, stream: int, scale: float = 1.0) -> np.ndarray:
        """Normal numbers of the tokens; other numbers for another stream."""
        return np.random.default_rng([self.seed, stream]).normal(0, scale, len(self.mask))

    def logprobs(self, stream: int) -> np.ndarray:
        return -np.abs(self.noise(stream))

    @property
    def lens(self) -> Tensor:
        return torch.tensor(self.seq_lens, dtype=torch.int64)

    @property
    def loss_mask(self) -> Tensor:
        return torch.tensor(self.mask, dtype=torch.bool)

    @property
    def token_rewards(self) -> np.ndarray:
        """Each sequence's reward on its last masked token."""
        out, ends = np.zeros(len(self.mask)), np.cumsum(self.seq_lens)
        for start, end, reward in zip(ends - self.seq_lens, ends, self.rewards, strict=True):
            places = [t for t in range(start, end) if self.mask[t]]
            if places:
                out[places[-1]] = reward
        return out

    def select(self, order: list[int]) -> tuple["Ragged", list[int]]:
        """The sequences in another order, and where their tokens were."""
        starts = np.cumsum(self.seq_lens) - self.seq_lens
        index = [int(starts[i]) + t for i in order for t in range(self.seq_lens[i])]
        chosen = Ragged(
            tuple(self.seq_lens[i] for i in order),
            tuple(self.mask[t] for t in index),
            tuple(self.groups[i] for i in order),
            tuple(self.rewards[i] for i in order),
        )
        return chosen, index


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    """Few groups and coarse rewards, so that ties and groups of one are common."""
    lens = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    size = len(lens)
    return Ragged(
        tuple(lens),
        tuple(draw(st.lists(st.booleans(), min_size=sum(lens), max_size=sum(lens)))),
        tuple(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))),
        tuple(draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, -3.0]), min_size=size, max_size=size))),
        draw(st.integers(0, 2**20)),
    )


Y, N = True, False
RARE = {
    "a group of one": Ragged((2, 3), (N, Y, Y, Y, N), (0, 1), (1.0, 0.0)),
    "equal rewards": Ragged((2, 3, 1), (N, Y, Y, Y, N, Y), (7, 7, 7), (0.1, 0.1, 0.1)),
    "an empty response": Ragged((2, 3, 2), (N, Y, N, N, N, N, Y), (0, 0, 0), (1.0, 5.0, 0.0)),
    "nothing is masked in": Ragged((2, 1), (N, N, N), (0, 0), (1.0, 0.0)),
    "one token": Ragged((1,), (Y,), (0,), (1.0,)),
}


def rare(test: Callable[..., Any]) -> Callable[..., Any]:
    """Try the rare batches besides what is drawn, of which fewer will do."""
    for batch in RARE.values():
        test = example(batch=batch)(test)
    return settings(max_examples=25)(test)
