"""The batch type.

Sequences lie end to end on one token axis. Padding is added only when a policy worker cuts its
micro-batches. Index ``t`` of every ``[N]`` field is about token ``t``: ``logprobs[t]`` is the
log-probability *of* token ``t``. ``rollout_expert_indices[t]`` are the experts that the rollout
engine chose while *reading* token ``t``. So the last token of a sequence has none: its
``route_mask`` is False.

Dims in the whole project:

N tokens, B sequences, G group size (responses per prompt), L layers that have a router, K experts
per token, E experts, V vocabulary, S local slots of a rank.

Two sequences, a prompt of 2 with a response of 2 and a prompt of 1 with a response of 2:

    tokens        = [11, 12, 21, 22, 13, 23, 24]    seq_lens = [4, 3]
    response_mask = [ F,  F,  T,  T,  F,  T,  T]
    route_mask    = [ T,  T,  T,  F,  T,  T,  F]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RouteRef:
    """Reference to routes of one sample in the object store, with their checksums: all of them, or
    those of one turn.

    ``blocks[i]`` refers to an array ``[R, block_sizes[i], K]`` of the i-th block of ``layers``. The
    rows are ``start_row`` up to ``start_row + rows`` of it. Short samples may share an object,
    because every object costs about a millisecond.

    Raises:
        ValueError: the blocks do not match the layers, or ``missing`` lies outside the rows.
    """

    start_row: int
    rows: int
    first_row: int = 0  # the row of the sample that the first of these is
    # Half-open ranges of rows of the sample whose experts are not known, in order. What is stored
    # there is well-formed and has no meaning.
    missing: tuple[tuple[int, int], ...] = ()
    layers: tuple[int, ...]  # the layers that have a router, among all, counted from 0
    experts_per_token: int
    num_experts: int
    dtype: str
    block_sizes: tuple[int, ...]  # layers per block
    checksums: tuple[int, ...]  # one per block, of the sample's own rows
    token_checksum: int  # of the tokens that the rows read
    blocks: tuple[Any, ...]
    weight_version: int
    producer: str  # e.g. "vLLM 0.30.0"
    node: str = ""  # address of the node whose store owns the objects

    def __post_init__(self) -> None:
        blocks = len(self.blocks), len(self.checksums), len(self.block_sizes)
        if sum(self.block_sizes) != len(self.layers) or len(set(blocks)) > 1:
            raise ValueError(
                f"expected blocks and checksums for {len(self.layers)} layers, found block sizes "
                f"{self.block_sizes}, {blocks[0]} blocks and {blocks[1]} checksums"
            )
        edges = [edge for span in self.missing for edge in span]
        end = self.first_row + self.rows
        if edges != sorted(set(edges)) or (
            edges and not self.first_row <= edges[0] <= edges[-1] <= end
        ):
            raise ValueError(
                f"expected missing rows in order, apart, and from {self.first_row} to {end}, found "
                f"{self.missing}"
            )


SampleRoutes = tuple[RouteRef, ...]
"""The routes of one sample, in order: one reference, or one for each turn. Each begins with the row
after the last of the one before."""


def _dims(*dims: str) -> Any:
    return field(default=None, metadata={"dims": dims})


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Sequences laid end to end on one token axis.

    Raises:
        ValueError: two fields disagree about a dim, or ``seq_lens`` do not sum to N.
    """

    tokens: Tensor = field(metadata={"dims": ("N",)})  # int64, prompt + response ids
    seq_lens: Tensor = field(metadata={"dims": ("B",)})  # int64, sums to N
    response_mask: Tensor = field(metadata={"dims": ("N",)})  # bool, True = sampled by the policy
    loss_mask: Tensor | None = _dims("N")  # bool, response_mask less whatever is filtered out
    loss_weights: Tensor | None = _dims("N")  # weights of tokens in the loss of their mini-batch
    rollout_logprobs: Tensor | None = _dims("N")  # vLLM, at sampling
    old_logprobs: Tensor | None = _dims("N")  # Megatron, before the update
    ref_logprobs: Tensor | None = _dims("N")  # the frozen reference
    truncated: Tensor | None = _dims("B")  # bool, the response was cut at the limit
    rewards: Tensor | None = _dims("B")
    token_rewards: Tensor | None = _dims("N")  # the reward at the last token, and penalties
    values: Tensor | None = _dims("N")  # critic, of the prefix before each token
    returns: Tensor | None = _dims("N")  # targets of the critic
    advantages: Tensor | None = _dims("N")
    correction_weights: Tensor | None = _dims(
        "N"
    )  # pi_old / pi_rollout, as the policy loss uses it
    group_ids: Tensor | None = _dims("B")  # int64, which prompt of the step
    # int64, version of the weights that sampled a sequence's last token
    weight_version: Tensor | None = _dims("B")
    token_versions: Tensor | None = _dims("N")  # of every token; of a prompt's, as of its response
    route_mask: Tensor | None = _dims("N")  # bool, rows whose experts were captured
    # On the controller references only, those of each sequence; [N, L, K] uint8 (E <= 256) or
    # int16 bits of uint16 in a policy worker.
    rollout_expert_indices: Tensor | tuple[SampleRoutes, ...] | None = _dims("N", "L", "K")
    # Only in a policy worker: the experts that its routers must choose, and in which rows.
    replay_expert_indices: Tensor | None = _dims("N", "L", "K")
    replay_mask: Tensor | None = _dims("N")

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for name, dims, value in self._present():
            if isinstance(value, tuple):
                dims, shape = ("B",), (len(value),)
            else:
                shape = tuple(value.shape)
            if len(shape) != len(dims):
                raise ValueError(f"{name}: expected dims {dims}, got shape {shape}")
            for dim, size in zip(dims, shape, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(f"{name}: {dim}={size}, but the batch has {dim}={sizes[dim]}")
        if (total := int(self.seq_lens.sum())) != sizes["N"]:
            raise ValueError(f"seq_lens sum to {total}, but tokens hold {sizes['N']}")

    def _present(self) -> list[tuple[str, tuple[str, ...], Any]]:
        named = [(f.name, f.metadata["dims"], getattr(self, f.name)) for f in fields(self)]
        return [entry for entry in named if entry[2] is not None]

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def offsets(self) -> Tensor:
        """Start of each sequence, and N at the end.  # [B + 1]"""
        return torch.cat([self.seq_lens.new_zeros(1), self.seq_lens.cumsum(0)])

    def check_tokens(self, vocab_size: int) -> None:
        """Raise ValueError for the first token without a row in an embedding of ``vocab_size``
        rows.

        Without this check, one rank would raise an IndexError, and tensor-parallel ranks would use
        a padding row."""
        if not len(self.tokens):
            return
        lowest, highest = self.tokens.aminmax()
        if lowest < 0 or highest >= vocab_size:
            at = int(((self.tokens < 0) | (self.tokens >= vocab_size)).nonzero()[0])
            sequence = int(torch.searchsorted(self.offsets, at, right=True)) - 1
            raise ValueError(
                f"sequence {sequence}, token {at - int(self.offsets[sequence])}: expected ids from "
                f"0 to {vocab_size - 1}, the rows of the model's embedding, found "
                f"{int(self.tokens[at])}: the tokenizer is not the model's"
                " [RL3006]"
            )

    def token_index(self, rows: Sequence[int]) -> Tensor:
        """Token positions of the sequences ``rows``, in that order.  # [n]"""
        spans = [torch.arange(span.start, span.stop) for span in self._spans(rows)]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def _spans(self, rows: Sequence[int]) -> list[slice]:
        """Slices of the sequences ``rows`` on the token axis."""
        offsets = self.offsets.tolist()
        return [slice(offsets[r], offsets[r + 1]) for r in rows]

    def require(self, *names: str) -> tuple[Tensor, ...]:
        """The named tensor fields, in that order. Raises ValueError unless all have been filled."""
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ValueError(
                f"the batch has no {', '.join(missing)}: run the stage that fills it first"
            )
        return tuple(getattr(self, name) for name in names)

    def with_fields(self, **values: Any) -> Self:
        return replace(self, **values)

    def select(self, rows: Sequence[int]) -> Self:
        """The sequences ``rows``, in that order, with every field."""
        spans = self._spans(rows)
        row_index = torch.tensor(list(rows), dtype=torch.int64)
        chosen: dict[str, Any] = {}
        for name, dims, value in self._present():
            if isinstance(value, tuple):
                chosen[name] = tuple(value[r] for r in rows)
            elif dims[0] == "N":
                chosen[name] = torch.cat([value[span] for span in spans] or [value[:0]])
            else:
                chosen[name] = value[row_index]
        return replace(self, **chosen)

    @classmethod
    def join(cls, batches: Sequence[Self]) -> Self:
        """Join batches with the same fields, in order. Groups of different batches stay
        separate."""
        assert len({frozenset(name for name, _, _ in b._present()) for b in batches}) == 1
        first_group, renumbered = 0, []
        for batch in batches:
            if batch.group_ids is not None:
                ids = batch.group_ids + first_group
                first_group = int(ids.max()) + 1 if len(ids) else first_group
                batch = batch.with_fields(group_ids=ids)
            renumbered.append({name: value for name, _, value in batch._present()})
        joined: dict[str, Any] = {}
        for name, value in renumbered[0].items():
            parts = [fields[name] for fields in renumbered]
            whole = isinstance(value, tuple)
            joined[name] = tuple(r for part in parts for r in part) if whole else torch.cat(parts)
        return cls(**joined)
