"""The passes a policy worker makes over its shard: score it, or update on it.

Both run Megatron's own ``forward_backward_func``, so any pipeline schedule it offers works, and
both route through `rltrain.policy.replay`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rltrain.algorithms.objective import Sums
from rltrain.policy.logprobs import vocab_parallel_logprobs
from rltrain.policy.mesh import Mesh
from rltrain.policy.micro_batch import MicroBatch
from rltrain.policy.model import decoder_routers
from rltrain.policy.replay import RoutingTaps, tapped
from rltrain.weights.architecture import Architecture

# One micro-batch's log-probabilities and entropy at its slots -> its share of the loss, its sums.
Objective = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, Sums]]


@dataclass(frozen=True)
class ModelOnMesh:
    """A model's chunks on this rank and what a pass needs to know about them."""

    chunks: Sequence[nn.Module]
    arch: Architecture
    mesh: Mesh
    temperature: float

    @property
    def route_layers(self) -> list[int]:
        """The layers of this rank that have a router, in order."""
        return sorted(layer for chunk in self.chunks for layer in decoder_routers(chunk))

    def logprobs(self, logits: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy, as sampled from.  # [1, S, V / tp] -> [S], [S]"""
        return vocab_parallel_logprobs(
            logits.squeeze(0).float() / self.temperature,
            target_ids,
            vocab_size=self.arch.vocab_size,
            rank=self.mesh.tp_rank,
            group=self.mesh.tp_group if self.mesh.tp_size > 1 else None,
        )


@dataclass(frozen=True)
class Scores:
    """What a forward pass over a shard found."""

    logprobs: Tensor  # float32, 0 for the first token of every sequence  # [N]
    native: Tensor | None  # what the routers would choose themselves  # [N, L, K]


def score(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    num_tokens: int,
    *,
    replay: bool,
    record: bool,
) -> Scores:
    """Log-probabilities of a shard's tokens, without gradients.

    Args:
        num_tokens: of the shard
        replay: route by the shard's ``rollout_expert_indices``
        record: also return what the routers would choose themselves
    """
    logprobs = torch.zeros(num_tokens)
    natives: dict[int, dict[int, Tensor]] = {}

    def collect(mb: MicroBatch, output: Tensor, non_loss_data: bool = True) -> None:
        found, _ = model.logprobs(output, mb.target_ids)
        mb.scatter(found, mb.layout.targets, logprobs)

    def after_forward(chunk: int, mb: MicroBatch, taps: RoutingTaps) -> None:
        if record and taps.layers:
            natives.setdefault(mb.number, {})[chunk] = taps.recorded(mb.number)

    with torch.no_grad():
        _run(
            model, micro_batches, collect, replay=replay, record=record, after_forward=after_forward
        )
    if model.mesh.cp_size > 1:
        dist.all_reduce(logprobs, group=model.mesh.cp_group)
    native = (
        _gather_native(model, micro_batches, natives, num_tokens) if record and natives else None
    )
    return Scores(logprobs, native)


def accumulate(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    replay: bool,
    recomputations: int,
) -> list[Sums]:
    """Add the gradient of a mini-batch to ``main_grad``; returns every micro-batch's sums.

    Megatron divides a loss by the number of micro-batches and its gradient by the data-parallel
    size. The objective's weights already hold the only denominator there is, so both are undone.
    """
    undo = len(micro_batches) * model.mesh.dp_size
    found: list[Sums] = []

    def loss(mb: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = objective(mb, *model.logprobs(output, mb.target_ids))
        found.append(sums)
        return value * undo, {}

    _run(model, micro_batches, loss, replay=replay, recomputations=recomputations)
    return found


def _run(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    on_output: Callable[..., Any],
    *,
    replay: bool,
    record: bool = False,
    recomputations: int | None = None,
    after_forward: Callable[[int, MicroBatch, RoutingTaps], None] = lambda *_: None,
) -> None:
    """One schedule over the micro-batches; ``recomputations`` None means forward only."""
    forward_only = recomputations is None
    layers = model.route_layers
    taps: dict[int, tuple[int, RoutingTaps]] = {}

    def forward_step(
        iterator: Iterator[MicroBatch], chunk: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        mb = next(iterator)
        number, chunk_taps = taps[id(chunk)]
        targets = None
        if replay:
            everywhere = mb.route_targets(layers, model.arch.num_experts)
            targets = {layer: everywhere[layer] for layer in chunk_taps.layers}
        with chunk_taps.forward(mb.number, targets):
            output = chunk(
                input_ids=mb.input_ids,
                position_ids=mb.position_ids,
                attention_mask=None,
                packed_seq_params=mb.packed_seq_params,
            )
        chunk_taps.mark_backward(mb.number, output)
        after_forward(number, mb, chunk_taps)
        return output, partial(on_output, mb)

    with ExitStack() as stack:
        for number, chunk in enumerate(model.chunks):
            block = tapped(
                decoder_routers(chunk),
                num_micro_batches=len(micro_batches),
                recomputations=recomputations or 0,
                record=record,
            )
            taps[id(chunk)] = (number, stack.enter_context(block))
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in model.chunks],
            model=list(model.chunks),
            num_microbatches=len(micro_batches),
            seq_length=max(len(mb.layout.tokens) for mb in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _gather_native(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    natives: dict[int, dict[int, Tensor]],
    num_tokens: int,
) -> Tensor:
    """Recorded routes of all ranks that share this shard's tokens, in this stage's layers.

    Returns:
        int16  # [N, L, K]
    """
    native: Tensor | None = None
    for mb in micro_batches:
        by_chunk = natives[mb.number]
        local = torch.cat([by_chunk[chunk] for chunk in sorted(by_chunk)], dim=1).to(torch.int16)
        index = mb.layout.routers
        # Bytes, because NCCL has no int16.
        rows = _all_gather(local.contiguous().view(torch.uint8), model.mesh).view(torch.int16)
        index = _all_gather(index.to(local.device), model.mesh)
        if native is None:
            native = torch.zeros(num_tokens, *rows.shape[1:], dtype=torch.int16)
        mb.scatter(rows, index.cpu(), native)
    assert native is not None
    return native


def _all_gather(local: Tensor, mesh: Mesh) -> Tensor:
    """Along dim 0, over the tensor- and context-parallel ranks."""
    if mesh.tp_size * mesh.cp_size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(mesh.tp_size * mesh.cp_size)]
    dist.all_gather(parts, local, group=mesh.tp_cp_group)
    return torch.cat(parts)
