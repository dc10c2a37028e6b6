"""One forward and backward pass with everything observed: what layouts are compared by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from rltrain.algorithms.objective import Sums
from rltrain.batch import Batch
from rltrain.parallel.token_layout import PAD
from rltrain.policy.logprobs.head import head_input, head_weight
from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.passes.micro_batch import MicroBatch
from rltrain.policy.passes.passes import ModelOnMesh, Recorder, accumulate
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.sync.sender import full_tensors


@dataclass(frozen=True)
class Observed:
    """Of one pass over one batch, gathered: the same on every rank but for the logits."""

    loss: float  # of the whole batch
    logits: Tensor | None
    """Of this rank's shard, on the last pipeline stage; fp32, 0 for the last token of a sequence,
    whose row predicts nothing and may use any experts.  # [N, V]"""
    logprobs: Tensor | None  # likewise  # [N]
    gradients: dict[str, Tensor]  # by Hugging Face name


@dataclass(frozen=True)
class _Observing(ModelOnMesh):
    """A model that keeps the logits it is asked to score."""

    kept: list[Tensor] = field(default_factory=list)

    def logprobs(self, output: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.append(self._logits(output.detach()))
        return super().logprobs(output, target_ids)

    @torch.no_grad()
    def _logits(self, output: Tensor) -> Tensor:
        """This rank's slice of the vocabulary, all tokens at once.  # [S, V / tp]"""
        head = head_weight(self.chunks[-1])
        if head is None:
            return output.squeeze(0)
        hidden = head_input(output, self.mesh.tp_group if self.mesh.tp_size > 1 else None)
        if self.policy.precision.head == "fp32":
            hidden, head = hidden.float(), head.float()
        return hidden @ head.t()


def observe(
    model: ModelOnMesh,
    shard: Batch,
    micro_batches: Sequence[MicroBatch],
    *,
    replay: bool,
    recorder: Recorder | None = None,
) -> Observed:
    """Minimize minus the ``loss_weights``-weighted log-probability; nothing is updated.

    Collective. ``main_grad`` of the chunks is overwritten.
    """
    observing = _Observing(model.chunks, model.arch, model.mesh, model.policy, model.temperature)
    mesh, num_tokens = model.mesh, shard.num_tokens
    logits = torch.zeros(num_tokens, model.arch.vocab_size)
    logprobs = torch.zeros(num_tokens)

    def objective(mb: MicroBatch, at_targets: Tensor, entropy: Tensor) -> tuple[Tensor, Sums]:
        mb.scatter(at_targets.detach(), mb.layout.targets, logprobs)
        predicting = torch.where(mb.layout.targets == PAD, PAD, mb.layout.tokens)
        mb.scatter(_whole_rows(observing.kept.pop(), model), predicting, logits)
        (weights,) = mb.batch.require("loss_weights")
        loss = -(mb.at_targets(weights) * at_targets).sum()
        return loss, Sums({"loss": loss.detach()}, {})

    for chunk in model.chunks:
        assert isinstance(chunk, DistributedDataParallel)
        chunk.zero_grad_buffer()
    sums = accumulate(observing, micro_batches, objective, replay=replay, recorder=recorder)
    sums_loss = mesh.is_last_stage and mesh.tp_rank == 0  # once per shard and its tokens
    loss = torch.tensor(sum(float(s.totals["loss"]) for s in sums) if sums_loss else 0.0)
    loss = loss.to(next(model.chunks[0].parameters()).device, torch.float64)
    dist.all_reduce(loss)
    return Observed(
        float(loss),
        model.over_context(logits) if mesh.is_last_stage else None,
        model.over_context(logprobs) if mesh.is_last_stage else None,
        whole_gradients(model.chunks, model.arch, mesh),
    )


def whole_gradients(chunks: Sequence[Any], arch: Architecture, mesh: Mesh) -> dict[str, Tensor]:
    """Every parameter's gradient after a pass, by Hugging Face name, in fp32. Collective.

    The distributed optimizer keeps one data-parallel shard of ``main_grad`` on each rank.
    """
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    named = full_tensors(chunks, arch, mesh, torch.float32, main_grad)
    return {name: tensor.cpu().clone() for name, tensor in named}


def main_grad(parameter: Any) -> Tensor:
    """What Megatron's DDP accumulates a parameter's gradient in."""
    gradient: Tensor = parameter.main_grad
    return gradient


def _whole_rows(logits: Tensor, model: ModelOnMesh) -> Tensor:
    """This rank's slice of the vocabulary to all of it.  # [S, V / tp] -> [S, V]"""
    local = logits.float().contiguous()
    parts = [torch.empty_like(local) for _ in range(model.mesh.tp_size)]
    if model.mesh.tp_size == 1:
        parts = [local]
    else:
        dist.all_gather(parts, local, group=model.mesh.tp_group)
    return torch.cat(parts, dim=1)[:, : model.arch.vocab_size]
