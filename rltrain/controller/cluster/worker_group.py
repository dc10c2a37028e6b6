"""All ranks of a Megatron world as one: the controller's handle on the policy or the critic."""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import ray
import torch
from torch import Tensor

from rltrain.actors.failures import AwaitedCall, get_all
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.data.packing import Plan, StepPlan, mini_batch_sizes, plan_step
from rltrain.policy.actor import ModelActor, Role
from rltrain.policy.types import Updated

logger = logging.getLogger(__name__)


class WorkerGroup:
    """Calls every worker at once and puts their answers back in the order of the batch."""

    role: ClassVar[Role]

    def __init__(self, config: Config, model_path: str, placed: Cluster) -> None:
        self._config = config
        self._timeout = config.cluster.call_timeout_s
        # The rendezvous is a file of this run alone: no port to collide with or to listen on.
        world = f"file://{tempfile.mkdtemp(prefix='rltrain-rendezvous-')}/world"
        self._workers = [
            ray.remote(ModelActor)
            .options(**placed.worker_options(self.role, rank))
            .remote(self.role, config, rank, world, model_path, placed.device)
            for rank in range(config.policy.parallel.world_size)
        ]
        began = time.monotonic()
        self._answers("start", [worker.start.remote() for worker in self._workers])
        logger.info("the %s is loaded, after %.0f s", self.role, time.monotonic() - began)
        self._dp_ranks = [place["dp_rank"] for place in self.call("place")]

    @property
    def stored(self) -> dict[str, tuple[str, str]]:
        """Folders of a checkpoint, and the workers' methods that write and read them."""
        return {self.role: ("save", "load")}

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """AwaitedCall ``method`` on every worker with the same arguments; results by rank."""
        return self._gather(method, lambda _: (args, kwargs))

    def _gather(self, method: str, arguments: Callable[[int], Any]) -> list[Any]:
        refs = []
        for rank, worker in enumerate(self._workers):
            args, kwargs = arguments(rank)
            refs.append(worker.call.remote(method, *args, **kwargs))
        return self._answers(method, refs)

    def _answers(self, method: str, refs: list[Any]) -> list[Any]:
        return get_all(refs, AwaitedCall(self.role, method), self._timeout)

    def shutdown(self) -> None:
        """End the workers; their GPUs and memory are free for others."""
        for worker in self._workers:
            ray.kill(worker)

    # A step

    def begin_step(self, batch: Batch) -> None:
        """Cut the batch over data-parallel ranks and hand every worker its shard."""
        parallel = self._config.policy.parallel
        self._batch = batch
        self._plan: StepPlan = plan_step(
            batch.seq_lens.tolist(),
            self._config.trainer.mini_batches,
            parallel.dp,
            self._config.policy.max_tokens_per_micro_batch,
            multiple_of=parallel.micro_batch_multiple,
            scoring_tokens=self._config.policy.scoring_tokens,
        )
        shards = [ray.put(batch.select(rows)) for rows in self._plan.shards]
        self._gather("begin_step", lambda rank: ((shards[self._dp_ranks[rank]],), {}))

    def _ask(self, method: str, **options: Any) -> list[list[Any]]:
        """Have every worker answer about its shard, in scoring's micro-batches.

        Returns:
            For each shard the answers of the ranks that spoke for it.
        """
        plan = self._plan.scoring
        answers = self._gather(method, lambda rank: ((plan[self._dp_ranks[rank]],), options))
        return self._by_dp_rank(answers)

    def _update(self, fields: dict[str, Tensor], **options: Any) -> list[Updated]:
        """One optimizer update per mini-batch that has a token in the loss.

        The others are left out: a gradient of zero would still move the parameters, by Adam's
        momentum and by weight decay.

        Args:
            fields: token fields of the whole batch that `begin_step` did not have  # [N] each
            options: of the workers' ``update``
        """
        batch = self._batch.with_fields(**fields)
        (weights,) = batch.require("loss_weights")
        shards = [batch.select(rows) for rows in self._plan.shards]
        sent = [ray.put({name: getattr(shard, name) for name in fields}) for shard in shards]
        sizes = mini_batch_sizes(batch.num_sequences, len(self._plan.updates))
        tokens = [int(lens.sum()) for lens in batch.seq_lens.split(sizes)]
        counted = [bool((part != 0).any()) for part in weights.split(tokens)]
        return [
            self._update_once(plan, sent, options)
            for plan, counts in zip(self._plan.updates, counted, strict=True)
            if counts
        ]

    def _update_once(self, plan: Plan, sent: Sequence[Any], options: dict[str, Any]) -> Updated:
        """``plan`` and ``sent`` are by data-parallel rank."""

        def arguments(rank: int) -> Any:
            shard = self._dp_ranks[rank]
            return (plan[shard], sent[shard]), options

        return _add([a for a in self._gather("update", arguments) if a is not None])

    def _by_dp_rank(self, answers: Sequence[Any]) -> list[list[Any]]:
        """For each shard the answers of the ranks that spoke for it."""
        shards: dict[int, list[Any]] = {dp_rank: [] for dp_rank in sorted(set(self._dp_ranks))}
        for dp_rank, answer in zip(self._dp_ranks, answers, strict=True):
            if answer is not None:
                shards[dp_rank].append(answer)
        return list(shards.values())

    def _unshard(self, shards: Sequence[Tensor]) -> Tensor:
        whole = torch.zeros(self._batch.num_tokens, dtype=shards[0].dtype)
        for rows, values in zip(self._plan.shards, shards, strict=True):
            whole[self._batch.token_index(rows)] = values
        return whole


def _add(shards: Sequence[Updated]) -> Updated:
    """Sums add over ranks with different tokens; the gradient norm and rate are the same on all."""
    return Updated(
        totals={name: sum(s.totals[name] for s in shards) for name in shards[0].totals},
        maxima={name: max(s.maxima[name] for s in shards) for name in shards[0].maxima},
        grad_norm=shards[0].grad_norm,
        lr=shards[0].lr,
    )
