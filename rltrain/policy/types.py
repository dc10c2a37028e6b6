"""Arguments and results of policy workers. Importable without Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rltrain.routing.flips import LayerFlips

NUM_PARTS = 4
NO_FLIP = 1 << 30

Plan = Sequence[Sequence[int]]  # sequence numbers of the shard, per micro-batch


@dataclass(frozen=True)
class Agreement:
    """How far native routing agrees with the rollout's, over rows whose routes were captured."""

    num_rows: int
    shared: dict[int, int]  # layer -> experts that both chose, summed over rows
    gate_mass: dict[
        int, float
    ]  # layer -> gate weight of the experts that were used, summed over rows
    part_rows: tuple[int, ...]  # rows in each of NUM_PARTS equal parts of their sequence
    part_shared: tuple[int, ...]  # likewise experts that both chose, summed over rows and layers
    flipped: Tensor  # bool, tokens that a different choice can have affected  # [N]
    first_flip: Tensor  # int64, the lowest layer in which a row differs, or NO_FLIP  # [N]
    load: dict[int, Tensor] = field(default_factory=dict)
    """layer -> response rows that the rollout sent to each expert, int64  # [E]"""
    num_judged: int = 0  # rows that `flips` are of; see `rltrain.routing.flips.judged_rows`
    flips: dict[int, LayerFlips] = field(default_factory=dict)
    """layer -> how its router rates the rollout's experts, where they were compared"""


@dataclass(frozen=True)
class StageScored:
    """The results of one pipeline stage for its shard."""

    logprobs: Tensor | None  # of the last stage  # [N]
    agreement: Agreement | None  # in the stage's layers
    replayed: tuple[int, int] = (0, 0)
    """Experts of the rollout that were kept, and those that were to be, in the stage's layers; of a
    pass in which some may not be."""


@dataclass(frozen=True)
class Scored:
    logprobs: Tensor  # [N]
    agreement: Agreement | None
    replayed: tuple[int, int] = (0, 0)
    """As of `StageScored`, of all stages and shards."""


@dataclass(frozen=True)
class NonFinite:
    """The first number of an update that is NaN or infinite; all ranks name the same."""

    quantity: str
    value: float
    ranks: tuple[int, ...] = ()
    """Those that computed it; none where it is of all."""
    detail: str = ""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        where = f" on rank{'s' if len(self.ranks) > 1 else ''} {ranks}" if ranks else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"the {self.quantity} is {self.value:g}{where}{detail}"


@dataclass(frozen=True)
class Place:
    """Of the first number in a forward pass that is NaN or infinite."""

    layer: int
    """Whose output has it, counted from 0; -1: the embedding; after the last layer: the
    log-probability alone."""
    token: int
    """Of the shard, or of the batch."""


@dataclass(frozen=True)
class Updated:
    """One optimizer update.

    The totals of all ranks that report are to be added, the maxima to be maximized. The gradient
    norm and the learning rate are equal on all ranks.
    """

    totals: dict[str, float]
    maxima: dict[str, float]
    grad_norm: float
    lr: float
    mini_batch: int = 0
    """Which of the step's, from 0."""
    nonfinite: NonFinite | None = None
    """Why the update was not made: then weights, optimizer and schedule are as they were."""
