"""All ranks of a Megatron world as one: the controller's handle on the policy or the critic."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import ray
import torch
from torch import Tensor

from rltrain.actors.failures import ActorFailed, AwaitedCall, check_nodes, get_all
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.cluster.method_call import method_call
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.data.packing import StepPlan, mini_batch_sizes, plan_step
from rltrain.parallel.rendezvous import Address, Member, Rendezvous
from rltrain.policy.actor import ModelActor, Role
from rltrain.policy.types import NonFinite, Plan, Updated
from rltrain.routing.links import Link, bytes_by_link
from rltrain.weights.huggingface.manifest import ManifestEntry

if TYPE_CHECKING:  # the workers' classes import Megatron, which the controller does not need
    from rltrain.policy.megatron_worker import MegatronWorker
    from rltrain.policy.offload import ModelPart

logger = logging.getLogger(__name__)

MOST_PAUSE_S = 1.0
"""Between two questions whether a rank has written."""

Worker = TypeVar("Worker", bound="MegatronWorker")
R = TypeVar("R")


@dataclass(frozen=True)
class Unmade:
    """An update that was left out, because a number of it is not finite."""

    role: Role
    mini_batch: int
    """From 0, among those of the step."""
    found: NonFinite

    def __str__(self) -> str:
        return f"{self.role}, mini-batch {self.mini_batch}: {self.found}"


class UpdateNotFinite(RuntimeError):
    """An update could not be made, and ``trainer.on_nonfinite`` is ``stop``. Weights and optimizer
    are as they were before it."""

    def __init__(self, unmade: Unmade) -> None:
        super().__init__(f"{unmade} [RL5005]")
        self.unmade = unmade


Written = Mapping[str, ManifestEntry]
"""What one rank wrote of a checkpoint: by file, its size and SHA-256."""


class WorkerGroup(Generic[Worker]):
    """Calls every worker at once and puts their answers back in the order of the batch."""

    role: ClassVar[Role]
    route_links: dict[Link, int]
    """Bytes of routes that came over each link for the last `begin_step`."""
    unmade: list[Unmade]
    """Of the last `begin_step`, the updates that ``trainer.on_nonfinite=skip`` left out."""

    def __init__(self, config: Config, model_path: str, placed: Cluster) -> None:
        self._config = config
        self._timeout = config.cluster.call_timeout_s
        nodes = {"policy": placed.policy_nodes, "critic": placed.critic_nodes}[self.role]
        self.nodes = nodes[: config.policy.parallel.world_size]
        """Of each rank."""
        self.on_answer: Callable[[int, str, float], None] = lambda rank, method, began: None
        """Is told when a rank has answered a method that all were asked for at a time."""
        self._workers = [
            ray.remote(ModelActor)
            .options(**placed.worker_options(self.role, rank))
            .remote(self.role, config, rank, model_path, placed.device)
            for rank in range(config.policy.parallel.world_size)
        ]
        began = time.monotonic()
        ready = self._started("prepare", [worker.prepare.remote() for worker in self._workers])
        self.members = [
            Member(f"{self.role} rank {rank}", prepared.node) for rank, prepared in enumerate(ready)
        ]
        self._store: Address = ready[0].store
        world = self.meet(self.members)
        self._started("start", [worker.start.remote(world) for worker in self._workers])
        logger.info("the %s is loaded, after %.0f s", self.role, time.monotonic() - began)
        places = self._call(lambda worker: worker.place())
        self._dp_ranks = [place["dp_rank"] for place in places]
        self.stages = [
            [rank for rank, place in enumerate(places) if place["stage"] == stage]
            for stage in range(config.policy.parallel.pp)
        ]
        """The ranks of each pipeline stage."""

    def _call(self, write: Callable[[Worker], R]) -> list[R]:
        """Call one method on every worker with the same arguments; results by rank.

        Args:
            write: see `method_call`
        """
        return self._call_by_rank(lambda worker, _: write(worker))

    def _call_by_rank(self, write: Callable[[Worker, int], R]) -> list[R]:
        """As `_call`, where the arguments depend on the rank. Object references in them reach the
        worker as the objects."""
        began = time.monotonic()
        method, refs = self._send(self._all_ranks, write)
        return self._answers(method, refs, lambda rank: self.on_answer(rank, method, began))

    def _begin(
        self, ranks: Sequence[int], write: Callable[[Worker, int], R]
    ) -> Callable[[], list[R]]:
        """As `_call_by_rank`, on some ranks.

        Returns:
            A function that waits for the answers, in the order of ``ranks``.
        """
        method, refs = self._send(ranks, write)
        return lambda: self._answers(method, refs)

    def _send(
        self, ranks: Sequence[int], write: Callable[[Worker, int], Any]
    ) -> tuple[str, list[Any]]:
        """As `_begin`; returns the method and references to the answers."""
        calls = [method_call(write, rank) for rank in ranks]
        check_nodes(AwaitedCall(self.role, calls[0].method))
        refs = [
            self._workers[rank].call.remote(call.method, *call.args, **call.kwargs)
            for rank, call in zip(ranks, calls, strict=True)
        ]
        return calls[0].method, refs

    @property
    def _all_ranks(self) -> Sequence[int]:
        return range(len(self._workers))

    def meet(self, members: Sequence[Member]) -> Rendezvous:
        """A rendezvous of a new group of processes, at the store that rank 0 serves."""
        return Rendezvous.at(self._store, members)

    def _started(self, method: str, refs: list[Any]) -> list[Any]:
        limit = self._config.cluster.start_timeout_s
        return get_all(refs, AwaitedCall(self.role, method, "cluster.start_timeout_s"), limit)

    def _answers(
        self, method: str, refs: list[Any], on_answer: Callable[[int], None] = lambda number: None
    ) -> list[Any]:
        return get_all(refs, AwaitedCall(self.role, method), self._timeout, on_answer)

    def shutdown(self) -> None:
        """End the workers; their GPUs and memory are free for others."""
        for worker in self._workers:
            ray.kill(worker)

    # Memory and checkpoints

    def offload(self, parts: "Sequence[ModelPart]") -> None:
        """See `MegatronWorker.offload`."""
        self._call(lambda worker: worker.offload(parts))

    def onload(self, parts: "Sequence[ModelPart]") -> None:
        """See `MegatronWorker.onload`."""
        self._call(lambda worker: worker.onload(parts))

    @property
    def folders(self) -> list[str]:
        """Of a checkpoint, those that `save` fills."""
        return [self.role]

    def save(self, checkpoint: Path) -> list[Written]:
        """Write parameters and optimizer state into the `folders` of a checkpoint.

        Returns:
            by rank, of the files that it wrote
        """
        folder = str(checkpoint / self.role)
        return in_folder(self.role, self._call(lambda worker: worker.save(folder)))

    def begin_save(self, checkpoint: Path) -> None:
        """As `save`, in the background: the model may change at once. `end_save` ends it."""
        folder = str(checkpoint / self.role)
        self._call(lambda worker: worker.begin_save(folder))

    def is_written(self, limit_s: float | None = None) -> bool:
        """Whether every rank has written what `begin_save` asked for, or has failed to.

        Args:
            limit_s: of the wait for their answers, where they may hang
        """
        method, refs = self._send(self._all_ranks, lambda worker, _: worker.is_written())
        limit_s = self._timeout if limit_s is None else limit_s
        return all(get_all(refs, AwaitedCall(self.role, method), limit_s))

    def end_save(self) -> list[Written]:
        """Wait for what `begin_save` began, and finish it.

        Returns:
            as `save`
        """
        # In short calls: how long they take is no measure of how long a rank writes.
        until, pause_s = time.monotonic() + self._timeout, 0.01
        while not self.is_written():
            if time.monotonic() > until:
                late = (
                    f"expected the files of a checkpoint within {self._timeout:g} s, and a rank "
                    "still writes: see its disk, or raise cluster.call_timeout_s"
                )
                raise ActorFailed("silent", f"{self.role}.end_save", late)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
        return [
            {
                f"{name}/{file}": entry
                for name, files in zip(self.folders, of_rank, strict=True)
                for file, entry in files.items()
            }
            for of_rank in self._call(lambda worker: worker.end_saves())
        ]

    def drop_save(self) -> None:
        """What `begin_save` began is not finished."""
        self._call(lambda worker: worker.drop_saves())

    def upload(self, checkpoint: Path, url: str, written: "Sequence[Written]") -> None:
        """Every rank uploads what it wrote; see `MegatronWorker.upload`.

        Args:
            written: by rank, as `save` said
        """
        names, folder = [list(files) for files in written], str(checkpoint)
        self._call_by_rank(lambda worker, rank: worker.upload(folder, url, names[rank]))

    def load(self, checkpoint: Path) -> None:
        """Read what `save` wrote."""
        self._call(lambda worker: worker.load(str(checkpoint / self.role)))

    def nonfinite_state(self) -> dict[int, list[str]]:
        """By rank, what it holds of the model and the optimizer that is NaN or infinite; empty
        where all is finite."""
        answers = self._call(lambda worker: worker.nonfinite_state())
        return {rank: names for rank, names in enumerate(answers) if names}

    # A step

    def begin_step(self, batch: Batch) -> None:
        """Cut the batch over data-parallel ranks and hand every worker its shard. A node gets a
        shard once, for all its ranks; of routes there are references in it."""
        parallel = self._config.policy.parallel
        self._batch, self.unmade = batch, []
        self._plan: StepPlan = plan_step(
            batch.seq_lens.tolist(),
            self._config.trainer.mini_batches,
            parallel.dp,
            self._config.policy.max_tokens_per_micro_batch,
            multiple_of=parallel.micro_batch_multiple,
            scoring_tokens=self._config.policy.scoring_tokens,
        )
        sent = batch.with_fields(token_versions=None)  # the controller's alone
        shards = [ray.put(sent.select(rows)) for rows in self._plan.shards]
        answers = self._call_by_rank(
            lambda worker, rank: worker.begin_step(shards[self._dp_ranks[rank]])
        )
        self.route_links = bytes_by_link(came for came in answers if came is not None)

    def _score(self, write: Callable[[Worker, Plan], R | None]) -> list[list[R]]:
        """Have every worker compute on its shard, in scoring's micro-batches.

        Returns:
            For each shard the answers of its output ranks.
        """
        plan = self._plan.scoring
        return self._by_dp_rank(
            self._call_by_rank(lambda worker, rank: write(worker, plan[self._dp_ranks[rank]]))
        )

    def _update(
        self,
        fields: dict[str, Tensor],
        write: Callable[[Worker, Plan, dict[str, Tensor]], Updated | None],
    ) -> list[Updated]:
        """One optimizer update per mini-batch that has a token in the loss.

        The others are left out: a gradient of zero would still move the parameters, by Adam's
        momentum and by weight decay.

        Args:
            fields: token fields of the whole batch that `begin_step` did not have  # [N] each
            write: the worker's ``update`` of a plan and the fields of its shard

        Returns:
            those that were made

        Raises:
            UpdateNotFinite: one was not, unless ``trainer.on_nonfinite`` is ``skip``.
        """
        batch = self._batch.with_fields(**fields)
        (weights,) = batch.require("loss_weights")
        shards = [batch.select(rows) for rows in self._plan.shards]
        sent = [ray.put({name: getattr(shard, name) for name in fields}) for shard in shards]
        sizes = mini_batch_sizes(batch.num_sequences, len(self._plan.updates))
        tokens = [int(lens.sum()) for lens in batch.seq_lens.split(sizes)]
        counted = [bool((part != 0).any()) for part in weights.split(tokens)]
        made = []
        for number, plan in enumerate(self._plan.updates):
            if not counted[number]:
                continue
            updated = replace(self._update_once(plan, sent, write), mini_batch=number)
            if updated.nonfinite is None:
                made.append(updated)
                continue
            unmade = Unmade(self.role, number, updated.nonfinite)
            if self._config.trainer.on_nonfinite == "stop":
                raise UpdateNotFinite(unmade)
            self.unmade.append(unmade)
        return made

    def _update_once(
        self,
        plan: Sequence[Plan],
        sent: Sequence[Any],
        write: Callable[[Worker, Plan, dict[str, Tensor]], Updated | None],
    ) -> Updated:
        """``plan`` and ``sent`` are by data-parallel rank."""

        def of_rank(worker: Worker, rank: int) -> Updated | None:
            shard = self._dp_ranks[rank]
            return write(worker, plan[shard], sent[shard])

        return _add([a for a in self._call_by_rank(of_rank) if a is not None])

    def _by_dp_rank(self, answers: Sequence[R | None]) -> list[list[R]]:
        """For each shard the answers of its output ranks."""
        shards: dict[int, list[R]] = {dp_rank: [] for dp_rank in sorted(set(self._dp_ranks))}
        for dp_rank, answer in zip(self._dp_ranks, answers, strict=True):
            if answer is not None:
                shards[dp_rank].append(answer)
        return list(shards.values())

    def _unshard(self, shards: Sequence[Tensor]) -> Tensor:
        whole = torch.zeros(self._batch.num_tokens, dtype=shards[0].dtype)
        for rows, values in zip(self._plan.shards, shards, strict=True):
            whole[self._batch.token_index(rows)] = values
        return whole


def in_folder(name: str, written: Sequence[Written]) -> list[Written]:
    """The same files by their names in the checkpoint, whose folder ``name`` has them."""
    return [{f"{name}/{file}": entry for file, entry in files.items()} for files in written]


def _add(shards: Sequence[Updated]) -> Updated:
    """Sums add over ranks with different tokens; the gradient norm and rate are the same on all."""
    return Updated(
        totals={name: sum(s.totals[name] for s in shards) for name in shards[0].totals},
        maxima={name: max(s.maxima[name] for s in shards) for name in shards[0].maxima},
        grad_norm=shards[0].grad_norm,
        lr=shards[0].lr,
        nonfinite=shards[0].nonfinite,
    )
