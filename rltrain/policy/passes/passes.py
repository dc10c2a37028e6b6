"""The passes a worker makes over its shard: ask the model about it, or update on it.

Both run Megatron's own ``forward_backward_func``, so any pipeline schedule it offers works, and
both route through `rltrain.policy.passes.replay`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rltrain.algorithms.objective import Sums
from rltrain.config.policy import PolicyConfig
from rltrain.policy.logprobs.head import head_input, head_weight, hidden_states
from rltrain.policy.logprobs.logprobs import Vocabulary, logprobs_of_hidden, logprobs_of_logits
from rltrain.policy.megatron.megatron_model import decoder_layers, decoder_routers
from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.passes.flip_sums import FlipSums
from rltrain.policy.passes.micro_batch import MicroBatch
from rltrain.policy.passes.recompute import router_reruns
from rltrain.policy.passes.replay import RouterRecord, RoutingTaps, tapped
from rltrain.routing.codec import route_dtype
from rltrain.routing.flips import LayerFlips
from rltrain.weights.architecture.decoder import Architecture

# One micro-batch and `ModelOnMesh.outputs` at its slots -> its share of the loss, its sums.
Objective = Callable[..., tuple[Tensor, Sums]]


@dataclass(frozen=True)
class ModelOnMesh:
    """A model's chunks on this rank and what a pass needs to know about them."""

    chunks: Sequence[nn.Module]
    arch: Architecture
    mesh: Mesh
    policy: PolicyConfig
    temperature: float = 1.0

    @cached_property
    def routers(self) -> list[dict[int, TopKRouter]]:
        """By chunk: the routers that a pass taps, by layer."""
        return [decoder_routers(chunk) for chunk in self.chunks]

    @cached_property
    def route_layers(self) -> list[int]:
        """The layers of this rank that have a router, in order."""
        return sorted(layer for routers in self.routers for layer in routers)

    def over_context(self, values: Tensor) -> Tensor:
        """CPU values that each context-parallel rank has for its own tokens, 0 for others', summed.

        Collective over those ranks; NCCL sums on the device alone.
        """
        if self.mesh.cp_size == 1:
            return values
        summed = values.to(next(self.chunks[0].parameters()).device)
        dist.all_reduce(summed, group=self.mesh.cp_group)
        return summed.cpu()

    def reruns(self, chunk: int) -> dict[int, int]:
        """How often the backward pass reruns each router of a chunk, by layer."""
        reruns = router_reruns(self.policy, decoder_layers(self.chunks[chunk]))
        return {layer: reruns[layer] for layer in self.routers[chunk]}

    def outputs(self, output: Tensor, target_ids: Tensor) -> tuple[Tensor, ...]:
        """What the last chunk's output says of each slot, first of all what `infer` gathers.

        Args:
            target_ids: the token that each slot predicts  # [S]

        Returns:
            Log-probabilities and entropy.  # [S] each
        """
        return self.logprobs(output, target_ids)

    def logprobs(self, output: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy, as sampled from, of what `hidden_states` yields.  # [S]"""
        tp = self.mesh.tp_group if self.mesh.tp_size > 1 else None
        vocabulary = Vocabulary(
            self.arch.vocab_size,
            self.mesh.tp_rank,
            tp,
            self.temperature,
            fp32=self.policy.precision.head == "fp32",
            kept_bytes=int(self.policy.kept_softmax_gib * 2**30),
        )
        head = head_weight(self.chunks[-1])
        if head is None:
            return logprobs_of_logits(output.squeeze(0), target_ids, vocabulary)
        return logprobs_of_hidden(head_input(output, tp), head, target_ids, vocabulary)


@dataclass(frozen=True)
class Recorded:
    """What this stage's routers did with a shard, gathered over the ranks that share it."""

    native: Tensor  # what they would have chosen, as `rltrain.routing.codec` stores it  # [N, L, K]
    used: Tensor  # what they were made to choose  # [N, L, K]
    gate_mass: Tensor  # fp32; see `rltrain.routing.agreement.gate_mass`  # [N, L]
    margin: Tensor  # fp32; see `rltrain.routing.agreement.choice_margin`  # [N, L]
    tokens: Tensor  # int64, what their rows read  # [N]
    deficits: Tensor | None = None  # bins of `rltrain.routing.deficits`, if compared  # [N, L, K]
    flips: dict[int, LayerFlips] | None = None  # by layer, if compared


@dataclass(frozen=True)
class Scores:
    """What a forward pass over a shard found."""

    logprobs: Tensor | None  # float32, 0 for the first token of every sequence  # [N]
    """Of the last pipeline stage alone."""
    recorded: Recorded | None


def score(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    num_tokens: int,
    *,
    replay: bool,
    record: bool,
    compare: bool = False,
    min_gate_ratio: float = 0.0,
) -> Scores:
    """Log-probabilities of a shard's tokens, without gradients.

    Args:
        num_tokens: of the shard
        replay: route by the shard's ``replay_expert_indices``
        record: also return what the routers did
        compare: with ``record`` and ``replay``, also how far the replayed experts lie below the
            routers' own choice
        min_gate_ratio: with ``replay``, which of these are kept; see `tapped`
    """
    recorder = Recorder(model, num_tokens, compare=compare) if record else None
    logprobs = infer(
        model,
        micro_batches,
        num_tokens,
        replay=replay,
        recorder=recorder,
        min_gate_ratio=min_gate_ratio,
    )
    return Scores(logprobs, recorder.gathered() if recorder is not None else None)


def infer(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    num_tokens: int,
    *,
    replay: bool = False,
    recorder: "Recorder | None" = None,
    min_gate_ratio: float = 0.0,
) -> Tensor | None:
    """The model's first output for every token of a shard, without gradients.

    A token's is that of the slot before it: of the first token of a sequence it is 0. float32, on
    the last pipeline stage.  # [N]
    """
    slots: list[tuple[MicroBatch, Tensor]] = []

    def collect(mb: MicroBatch, output: Tensor, non_loss_data: bool = True) -> None:
        slots.append((mb, model.outputs(output, mb.target_ids)[0]))

    with torch.no_grad():
        _run(
            model,
            micro_batches,
            collect,
            replay=replay,
            recorder=recorder,
            min_gate_ratio=min_gate_ratio,
        )
    by_token = torch.zeros(num_tokens)
    for mb, values in slots:  # now, and not while there are micro-batches to start
        mb.scatter(values, mb.layout.targets, by_token)
    return model.over_context(by_token) if model.mesh.is_last_stage else None


def accumulate(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    replay: bool,
    recorder: "Recorder | None" = None,
) -> list[Sums]:
    """Add the gradient of a mini-batch to ``main_grad``; returns every micro-batch's sums, on the
    last pipeline stage.

    Megatron divides a loss by the number of micro-batches and its gradient by the data-parallel
    size; the context-parallel size it multiplies by in one place and divides by in another. The
    objective's weights already hold the only denominator there is, so the first two are undone.
    """
    undo = len(micro_batches) * model.mesh.dp_size
    all_sums: list[Sums] = []

    def loss(mb: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = objective(mb, *model.outputs(output, mb.target_ids))
        all_sums.append(sums)
        return value * undo, {}

    _run(model, micro_batches, loss, replay=replay, backward=True, recorder=recorder)
    return all_sums


def _run(
    model: ModelOnMesh,
    micro_batches: Sequence[MicroBatch],
    on_output: Callable[..., Any],
    *,
    replay: bool,
    backward: bool = False,
    recorder: "Recorder | None" = None,
    min_gate_ratio: float = 0.0,
) -> None:
    """One schedule over the micro-batches."""
    layers = model.route_layers
    taps: dict[int, RoutingTaps] = {}

    def forward_step(
        iterator: Iterator[MicroBatch], chunk: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        mb = next(iterator)
        chunk_taps = taps[id(chunk)]
        targets = None
        if replay:
            targets = mb.route_targets(
                layers, chunk_taps.layers, model.arch.num_experts, record=recorder is not None
            )
        with chunk_taps.forward(mb.number, targets), hidden_states(chunk):
            output = chunk(
                input_ids=mb.input_ids,
                position_ids=mb.position_ids,
                attention_mask=None,
                packed_seq_params=mb.packed_seq_params,
            )
        chunk_taps.mark_backward(mb.number, output)
        if recorder is not None:
            recorder.keep(mb, chunk_taps)
        return output, partial(on_output, mb)

    with ExitStack() as stack:
        for number, chunk in enumerate(model.chunks):
            block = tapped(
                model.routers[number],
                num_micro_batches=len(micro_batches),
                recomputations=model.reruns(number) if backward else None,
                record=recorder is not None,
                compare=recorder is not None and recorder.compares,
                min_gate_ratio=min_gate_ratio if replay else 0.0,
            )
            taps[id(chunk)] = stack.enter_context(block)
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in model.chunks],
            model=list(model.chunks),
            num_microbatches=len(micro_batches),
            seq_length=max(len(mb.layout.tokens) for mb in micro_batches),
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )


class Recorder:
    """Keeps what routers did, micro-batch by micro-batch, and puts it back in the shard's order."""

    def __init__(self, model: ModelOnMesh, num_tokens: int, *, compare: bool = False) -> None:
        self._model = model
        self._num_tokens = num_tokens
        self._flips = FlipSums(model.route_layers, model.arch.num_experts) if compare else None
        self._micro_batches: dict[int, MicroBatch] = {}
        self._kept: dict[int, dict[int, RouterRecord]] = {}

    def keep(self, mb: MicroBatch, taps: RoutingTaps) -> None:
        self._micro_batches[mb.number] = mb
        records = taps.recorded(mb.number)
        self._kept.setdefault(mb.number, {}).update(records)
        if self._flips is not None:
            self._flips.add(mb, records)

    @property
    def compares(self) -> bool:
        return self._flips is not None

    def gathered(self) -> Recorded:
        """Collective over the ranks that share the shard's tokens. L may be 0."""
        layers, mesh, n = self._model.route_layers, self._model.mesh, self._num_tokens
        k, dtype = self._model.arch.experts_per_token, self._dtype()
        whole = Recorded(
            native=torch.zeros(n, len(layers), k, dtype=dtype),
            used=torch.zeros(n, len(layers), k, dtype=dtype),
            gate_mass=torch.zeros(n, len(layers)),
            margin=torch.zeros(n, len(layers)),
            tokens=torch.zeros(n, dtype=torch.int64),
            deficits=torch.zeros(n, len(layers), k, dtype=torch.uint8) if self.compares else None,
            flips=None if self._flips is None else self._flips.summed(mesh),
        )
        for number, mb in self._micro_batches.items() if layers else ():
            kept = [self._kept[number][layer] for layer in layers]
            read = mb.input_ids.squeeze(0).chunk(mesh.tp_size)[mesh.tp_rank]
            index = _all_gather(mb.layout.routers.to(read.device), mesh).cpu()
            for rows, shard in (
                (torch.stack([r.native for r in kept], dim=1).to(dtype), whole.native),
                (torch.stack([r.used for r in kept], dim=1).to(dtype), whole.used),
                (torch.stack([r.gate_mass for r in kept], dim=1), whole.gate_mass),
                (torch.stack([r.margin for r in kept], dim=1), whole.margin),
                (read, whole.tokens),
            ):
                mb.scatter(_all_gather(rows, mesh), index, shard)
            if whole.deficits is not None:
                of_layers = [r.deficits.bins for r in kept if r.deficits is not None]
                mb.scatter(_all_gather(torch.stack(of_layers, dim=1), mesh), index, whole.deficits)
        return whole

    def _dtype(self) -> torch.dtype:
        name = str(route_dtype(max(1, self._model.arch.num_experts)))
        return {"uint8": torch.uint8, "int16": torch.int16}[name]


def _all_gather(local: Tensor, mesh: Mesh) -> Tensor:
    """Along dim 0, over the tensor- and context-parallel ranks."""
    if mesh.tp_size * mesh.cp_size == 1:
        return local
    # Bytes, because NCCL has no int16.
    flat = local.contiguous().view(torch.uint8)
    parts = [torch.empty_like(flat) for _ in range(mesh.tp_size * mesh.cp_size)]
    dist.all_gather(parts, flat, group=mesh.tp_cp_group)
    return torch.cat(parts).view(local.dtype)
