"""A step of random routers, an engine that rounds, and the gate on what replay is given."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rltrain.routing.deficits import Deficits, deficits
from rltrain.routing.expert_groups import score_groups, within_groups
from rltrain.routing.flips import LayerFlips, WideFlips, judged_rows, wide_flips
from rltrain.routing.margin_gate import Finding, JudgedStep, systematic
from rltrain.routing.noise import last_narrow_bin, noise_scale


@dataclass
class Step:
    """Independent logits in every layer, of which the engine sees a noisy copy."""

    experts: int = 32
    k: int = 8
    layers: int = 3
    samples: int = 64
    length: int = 41  # the last token of a sample owes no route
    noise: float = 0.01  # scale of the difference between engine and trainer
    sigmoid: bool = False
    groups: tuple[int, int] | None = None  # groups, groups of a token
    seed: int = 0
    bias: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        shape = (self.layers, self.samples * self.length, self.experts)
        self.logits = torch.randn(shape, generator=draw)
        self.moved = self.logits + self.noise * torch.randn(shape, generator=draw)
        self.tokens = torch.randint(1000, (shape[1],), generator=draw)
        if self.sigmoid:
            self.bias = 0.05 * torch.randn(self.experts, generator=draw)
        self.seq_lens = torch.full((self.samples,), self.length)
        self.mask = torch.ones(shape[1], dtype=torch.bool)
        self.mask[self.seq_lens.cumsum(0) - 1] = False

    def scores(self, logits: Tensor) -> Tensor:
        return logits if self.bias is None else logits.sigmoid() + self.bias

    @property
    def best(self) -> int:
        return 2 if self.sigmoid else 1

    @cached_property
    def routes(self) -> Tensor:
        """What the engine chose.  # [N, L, K]"""
        chosen = []
        for logits in self.moved:
            scores = self.scores(logits)
            if self.groups is not None:
                of_groups = score_groups(scores, self.groups[0], self.best)
                scores = within_groups(scores, of_groups, self.groups[1])
            chosen.append(scores.topk(self.k).indices)
        return torch.stack(chosen, dim=1)

    def compared(self, layer: int, experts: Tensor) -> Deficits:
        logits = self.logits[layer]
        groups, kept = self.groups or (None, None)
        return deficits(
            self.scores(logits),
            experts,
            gates=logits.sigmoid() if self.sigmoid else None,
            num_groups=groups,
            group_topk=kept,
            best=self.best,
        )

    def judge(self, routes: Tensor) -> tuple[WideFlips, JudgedStep, list[Finding]]:
        """As workers and controller do together."""
        judged = judged_rows(self.mask, self.seq_lens)
        found = [self.compared(layer, routes[:, layer]) for layer in range(self.layers)]
        flips = {
            layer: LayerFlips(
                each.runners_up[judged].flatten().long().bincount(minlength=256),
                float(each.spread[judged].sum()),
                routes[judged, layer].flatten().bincount(minlength=self.experts),
            )
            for layer, each in enumerate(found)
        }
        rows = int(judged.sum())
        narrow = {
            layer: last_narrow_bin(each, noise_scale(each.runners_up), rows)
            for layer, each in flips.items()
        }
        given = torch.stack([each.bins for each in found], dim=1)
        ids = routes.to(torch.uint8)
        wide = wide_flips(given, ids, judged, tuple(range(self.layers)), narrow)
        uses = {layer: each.uses for layer, each in flips.items()}
        case = JudgedStep(
            self.tokens.numpy(),
            self.seq_lens.numpy(),
            judged.numpy(),
            tuple(range(self.layers)),
            self.k,
            uses,
        )
        return wide, case, systematic(wide, case)

    def by_sample(self) -> Tensor:
        """A copy of the routes to spoil.  # [samples, length, L, K]"""
        return self.routes.clone().view(self.samples, self.length, self.layers, self.k)

    def random_experts(self, *shape: int) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed + 1)
        scores = torch.rand(*shape, self.experts, generator=draw)
        return scores.topk(self.k).indices


def faults(step: Step) -> Iterator[tuple[str, str, Tensor]]:
    """Name, where the gate is to find it, spoiled routes: a tenth of what a mean did not see."""
    true, draw = step.by_sample(), torch.Generator().manual_seed(step.seed + 2)
    late = true.roll(1, 1)

    routes = step.by_sample()
    routes[17] = true[18]
    yield "one sample swapped", "sample 17 of 64", routes
    routes = step.by_sample()
    routes[17, 1:] = late[17, 1:]
    yield "one sample late", "sample 17 of 64", routes

    few = torch.rand(true.shape[:2], generator=draw) < 0.03
    few[:, 0] = False
    routes = step.by_sample()
    routes[few] = step.random_experts(int(few.sum()), step.layers)
    yield "3 % of rows random", "rows all over the step", routes
    routes = step.by_sample()
    routes[few] = late[few]
    yield "3 % of rows stale", "rows all over the step", routes

    routes = step.by_sample()
    routes.view(-1, step.layers, step.k)[40::40] = late.view(-1, step.layers, step.k)[40::40]
    yield "every 40th row of the step stale", "rows all over the step", routes
    routes = step.by_sample()
    routes[:, 7::16] = late[:, 7::16]
    yield "every 16th row of a sample stale", "row 7 of every 16 rows", routes

    routes = step.by_sample()
    routes[:, 1:3] = late[:, 1:3]
    yield "first 5 % late", "rows from 0% to 6%|row [12] of every sample", routes
    routes = step.by_sample()
    routes[:, -2] = true[:, -3]
    yield "last 2.5 % late", "the last row of every sample", routes

    column = min(5, step.k - 1)
    routes = step.by_sample()
    others = torch.randint(1, step.experts, true.shape[:2], generator=draw)
    new = (true[:, :, 1, column] + others) % step.experts
    is_there = (true[:, :, 1] == new.unsqueeze(-1)).any(-1)
    routes[:, :, 1, column] = torch.where(is_there, true[:, :, 1, column], new)
    where = f"layer 1, column {column}$"
    if step.k == 1 or step.groups:  # a group that comes in has others that seem to be missing
        where = "layer 1(, column 5)?$"
    yield "one column of a layer", where, routes

    routes = step.by_sample()
    ids = torch.arange(step.experts)
    ids[[3, 7]] = ids[[7, 3]]
    routes[:, :, 1] = ids[true[:, :, 1]]
    yield "two ids exchanged in a layer", "layer 1, expert [37]$", routes


def flips_of(rows: np.ndarray, layers: np.ndarray) -> WideFlips:
    """Of column 0 and expert 0, sorted."""
    order = np.lexsort((layers, rows))
    zeros = np.zeros(len(rows), dtype=np.int64)
    return WideFlips(rows[order], layers[order], zeros, zeros)
