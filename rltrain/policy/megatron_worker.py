"""One rank of a trained model: the base class of policy and critic workers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rltrain.algorithms.objective import Sums
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.optimizer import OptimizerConfig
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.policy import model_checkpoint as checkpoint
from rltrain.policy.finite import NotFinite, nonfinite_names
from rltrain.policy.megatron.megatron_model import build_model
from rltrain.policy.megatron.mesh import init_mesh
from rltrain.policy.offload import (
    ModelPart,
    Offloader,
    PartTensors,
    gradient_buffers,
    optimizer_state,
    parameters_and_buffers,
)
from rltrain.policy.optimizer import build_optimizer, take_step
from rltrain.policy.passes.micro_batch import MicroBatch, cut
from rltrain.policy.passes.passes import ModelOnMesh, Objective, Recorder, accumulate
from rltrain.policy.rank_save import RankSave
from rltrain.policy.types import Plan, Updated
from rltrain.routing.links import FetchedObjects
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.load import load_huggingface
from rltrain.weights.huggingface.manifest import ManifestEntry
from rltrain.weights.huggingface.remote_folder import RemoteFolder
from rltrain.weights.huggingface.stored_model import POLICY


class MegatronWorker(ABC):
    """A rank with its mesh, its model chunks and its shard of a step's sequences.

    A subclass sets ``model``, which its passes run.
    """

    model: ModelOnMesh

    def __init__(
        self,
        config: Config,
        arch: Architecture,
        optimizer: OptimizerConfig,
        rank: int,
        rendezvous: Rendezvous,
        model_path: str,
        device: torch.device,
        *,
        steps: int,
    ) -> None:
        """
        Args:
            steps: trainer steps that update the model, if each mini-batch has a loss token
        """
        self.config = config
        self.arch = arch
        self.device = device
        self.model_path = model_path
        self.freeze_router = optimizer.freeze_router
        self.mesh = init_mesh(
            config.policy.parallel,
            rank,
            config.policy.parallel.world_size,
            rendezvous,
            device,
            seed=config.trainer.seed,
            start_timeout_s=config.cluster.start_timeout_s,
            timeout_s=config.cluster.call_timeout_s,
        )
        self.chunks = self._load(ddp=True)
        self.optimizer, self.learning_rate = build_optimizer(
            self.chunks,
            optimizer,
            config.policy.precision,
            device,
            total_updates=steps * config.trainer.mini_batches,
        )
        self.shard: Batch | None = None
        self.saves: list[RankSave] = []
        """Of a checkpoint that is written in the background, one for each of its folders."""

    def _load(self, *, ddp: bool) -> list[MegatronModule]:
        chunks = build_model(
            self.arch,
            self.config.policy,
            self.mesh,
            device=self.device,
            routing_replay=self.arch.num_experts > 0 and not self.arch.value_head,
            ddp=ddp,
            freeze_router=self.freeze_router,
        )
        if (weights := self.config.model.weights) is not None:
            folder = Path(weights).expanduser() / POLICY
            trust = self.config.checkpoint.trust
            checkpoint.load_weights(str(folder), chunks, self.mesh, trust=trust)
        else:
            load_huggingface(self.model_path, chunks, self.arch, self.mesh)
        return chunks

    def place(self) -> dict[str, Any]:
        """The data-parallel rank, whose shard this rank needs, pipeline stage and device."""
        mesh = self.mesh
        return {
            "rank": mesh.rank,
            "dp_rank": mesh.dp_rank,
            "stage": mesh.pp_rank,
            "device": str(self.device),
        }

    # Device memory

    @cached_property
    def offloader(self) -> Offloader:
        """Made at the first use, once the subclass has all its parts."""
        return Offloader(self.device, self._parts())

    def _parts(self) -> PartTensors:
        return {
            "parameters": lambda: parameters_and_buffers(self.chunks),
            "gradients": lambda: gradient_buffers(self.chunks),
            "optimizer": lambda: optimizer_state(self.optimizer),
        }

    def offload(self, parts: Sequence[ModelPart]) -> None:
        """Free the device memory of ``parts``; see `Offloader`."""
        self.offloader.offload(parts)

    def onload(self, parts: Sequence[ModelPart]) -> None:
        """Bring ``parts`` back to the device; see `Offloader`."""
        self.offloader.onload(parts)

    # Passes

    @abstractmethod
    def begin_step(self, shard: Batch) -> FetchedObjects | None:
        """Take this rank's sequences of the step; say what of their routes came from other
        nodes."""

    def _shard(self) -> Batch:
        assert self.shard is not None, "begin_step comes first"
        return self.shard

    def _cut(self, plan: Plan, shard: Batch) -> list[MicroBatch]:
        grid = replace(self.mesh.token_grid, align=self.config.policy.slot_align)
        return cut(shard, plan, grid, self.device)

    def _accumulate(
        self,
        plan: Plan,
        shard: Batch,
        objective: Objective,
        *,
        replay: bool = False,
        recorder: Recorder | None = None,
    ) -> list[Sums]:
        """Compute the gradient of the planned sequences. Returns the objective's sums."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return accumulate(
            self.model, self._cut(plan, shard), objective, replay=replay, recorder=recorder
        )

    def _take_step(self, sums: Sequence[Sums]) -> Updated | None:
        """Update the parameters. Of the ranks with the same sums, one returns them.

        Where the loss or the gradient is not finite, no rank updates anything, and the learning
        rate does not advance: the next update is the one that this would have been.
        """
        totals = {n: _stacked([s.totals for s in sums], n).sum() for n in _names(sums, "totals")}
        loss = float(totals["loss"]) if "loss" in totals else 0.0  # of the last stage alone
        made = self.learning_rate.update
        lr, nonfinite = self.learning_rate.step(), None
        try:
            grad_norm = take_step(self.optimizer, self.chunks, loss)
        except NotFinite as error:
            self.learning_rate.update = made
            grad_norm, nonfinite = math.nan, error.found
        # Each context-parallel rank has the sums of its own tokens.
        if self.mesh.tp_rank or not self.mesh.is_last_stage:
            return None
        maxima = _names(sums, "maxima")
        return Updated(
            totals={n: float(total) for n, total in totals.items()},
            maxima={n: float(_stacked([s.maxima for s in sums], n).max()) for n in maxima},
            grad_norm=grad_norm,
            lr=lr,
            nonfinite=nonfinite,
        )

    def nonfinite_state(self) -> list[str]:
        """What this rank holds of the model and the optimizer that is NaN or infinite."""
        weights = [
            (name.removeprefix("module."), value)
            for chunk in self.chunks
            for name, value in chunk.named_parameters()
        ]
        # An optimizer's tensors are shards of many parameters, which have no names.
        states = [("the optimizer's state", value) for value in optimizer_state(self.optimizer)]
        return list(dict.fromkeys(nonfinite_names([*weights, *states])))

    # Checkpoints

    def save(self, folder: str) -> dict[str, ManifestEntry]:
        """Write parameters and optimizer state; see `model_checkpoint.save_model`. Collective."""
        return checkpoint.save_model(
            folder, self.chunks, self.optimizer, self.learning_rate, self.mesh
        )

    def begin_save(self, folder: str) -> None:
        """As `save`, in the background: the model may change at once. Collective."""
        model = (self.chunks, self.optimizer, self.learning_rate, self.mesh)
        self.saves.append(checkpoint.begin_model(folder, *model))

    def is_written(self) -> bool:
        """Whether this rank has done what it can alone for what was begun, well or not."""
        return all(save.is_written() for save in self.saves)

    def end_saves(self) -> list[dict[str, ManifestEntry]]:
        """Finish what was begun, in that order; see `RankSave.finish`. Collective."""
        saves = self.saves
        self.drop_saves()
        for save in saves:
            save.wait()  # none writes any more, also if one of them failed
        return [save.finish() for save in saves]

    def drop_saves(self) -> None:
        """Finish nothing of what was begun. Its threads end by themselves."""
        self.saves = []

    def upload(self, folder: str, url: str, names: Sequence[str]) -> None:
        """Copy these files of a local folder to the folder behind ``url``."""
        RemoteFolder(url).put({name: Path(folder) / name for name in names})

    def load(self, folder: str) -> None:
        """Read what `save` wrote. Collective."""
        trust = self.config.checkpoint.trust
        model = (self.chunks, self.optimizer, self.learning_rate, self.mesh)
        checkpoint.load_model(folder, *model, trust=trust)


def _names(sums: Sequence[Sums], kind: Literal["totals", "maxima"]) -> list[str]:
    """None on a pipeline stage that has no loss."""
    return list(getattr(sums[0], kind)) if sums else []


def _stacked(values: Sequence[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([v[name] for v in values])
