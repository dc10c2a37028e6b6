"""All policy workers as one: the controller's handle on the Megatron world."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch import Tensor

from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.data.packing import Plan, StepPlan, mini_batch_sizes, plan_step
from rltrain.parallel.tokens import TokenGrid, padded_lengths
from rltrain.policy.actor import PolicyActor
from rltrain.policy.types import Agreement, Scored, StageScored, Updated

DEATH_NOTICE_S = 5.0
"""How long after a failure another worker's death may still be reported as its cause."""


class PolicyGroup:
    """Calls every worker at once and puts their answers back in the order of the batch."""

    def __init__(
        self, config: Config, model_path: str, device: str, actor_options: dict[str, Any]
    ) -> None:
        self._config = config
        self._timeout = config.cluster.call_timeout_s
        # The rendezvous is a file of this run alone: no port to collide with or to listen on.
        folder = Path(tempfile.mkdtemp(prefix="rltrain-rendezvous-"))
        actor = ray.remote(PolicyActor).options(**actor_options)
        self._workers = [
            actor.remote(config, rank, f"file://{folder}/world", model_path, device)
            for rank in range(config.policy.parallel.world_size)
        ]
        self._answers("start", [worker.start.remote() for worker in self._workers])
        self._dp_ranks = [place["dp_rank"] for place in self.call("place")]

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``method`` on every worker with the same arguments; results by rank."""
        return self._gather(method, lambda _: (args, kwargs))

    def _gather(self, method: str, arguments: Callable[[int], Any]) -> list[Any]:
        refs = []
        for rank, worker in enumerate(self._workers):
            args, kwargs = arguments(rank)
            refs.append(worker.call.remote(method, *args, **kwargs))
        return self._answers(method, refs)

    def _answers(self, method: str, refs: list[Any]) -> list[Any]:
        try:
            _raise_first_error(refs, self._timeout)
            return ray.get(refs)
        except GetTimeoutError as error:
            raise RuntimeError(
                f"policy.{method}: expected an answer of all {len(refs)} workers within "
                f"{self._timeout:.0f} s. One hangs or is slow: see ray-logs in the run's folder, "
                "or raise cluster.call_timeout_s"
            ) from error
        except RayTaskError as error:
            raise RuntimeError(
                f"policy.{method}: {type(error.cause).__name__}: {error.cause}"
            ) from error
        except RayActorError as error:
            raise RuntimeError(
                f"policy.{method}: a policy worker died ({error}). Often it ran out of memory: see "
                "ray-logs in the run's folder, and lower policy.max_tokens_per_micro_batch"
            ) from error

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
        )
        shards = [ray.put(batch.select(rows)) for rows in self._plan.shards]
        self._gather("begin_step", lambda rank: ((shards[self._dp_ranks[rank]],), {}))

    def score(
        self,
        *,
        routing: Literal["native", "rollout", "recorded"],
        measure: bool = False,
        record: bool = False,
        of: Literal["policy", "reference"] = "policy",
    ) -> Scored:
        """Log-probabilities of the whole batch; see `PolicyWorker.score`."""
        options = {"routing": routing, "measure": measure, "record": record, "of": of}
        answers = self._gather(
            "score", lambda rank: ((self._plan.scoring[self._dp_ranks[rank]],), options)
        )
        shards = [merge_stages(stages) for stages in self._by_dp_rank(answers)]
        logprobs = self._unshard([scored.logprobs for scored in shards])
        found = [scored.agreement for scored in shards if scored.agreement is not None]
        return Scored(logprobs, self._merge(found) if found else None)

    def update(
        self,
        fields: dict[str, Tensor],
        *,
        routing: Literal["native", "rollout", "recorded"],
        kl_coef: float = 0.0,
    ) -> list[Updated]:
        """One optimizer update per mini-batch that has a token in the loss.

        The others are left out: a gradient of zero would still move the parameters, by Adam's
        momentum and by weight decay.

        Args:
            fields: token fields of the whole batch that `begin_step` did not have  # [N] each
            kl_coef: see `PolicyWorker.update`
        """
        batch = self._batch.with_fields(**fields)
        (weights,) = batch.require("loss_weights")
        shards = [batch.select(rows) for rows in self._plan.shards]
        sent = [ray.put({name: getattr(shard, name) for name in fields}) for shard in shards]
        sizes = mini_batch_sizes(batch.num_sequences, len(self._plan.updates))
        tokens = [int(lens.sum()) for lens in batch.seq_lens.split(sizes)]
        counted = [bool((part != 0).any()) for part in weights.split(tokens)]
        options = {"routing": routing, "kl_coef": kl_coef}
        return [
            self._update_once(plan, sent, options)
            for plan, counts in zip(self._plan.updates, counted, strict=True)
            if counts
        ]

    @property
    def padded_fraction(self) -> float:
        """Padding among the rows that routers see in the step's updates."""
        parallel, lens = self._config.policy.parallel, self._batch.seq_lens.tolist()
        align = self._config.policy.slot_align
        grid = TokenGrid(tp_size=parallel.tp, cp_size=parallel.cp, align=align)
        slots = sum(
            sum(padded_lengths([lens[shard[i]] for i in micro_batch], grid))
            for plan in self._plan.updates
            for shard, cuts in zip(self._plan.shards, plan, strict=True)
            for micro_batch in cuts
        )
        return 1 - self._batch.num_tokens / slots

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

    def _merge(self, found: Sequence[Agreement]) -> Agreement:
        layers = found[0].shared
        return Agreement(
            num_rows=sum(a.num_rows for a in found),
            shared={layer: sum(a.shared[layer] for a in found) for layer in layers},
            gate_mass={layer: sum(a.gate_mass[layer] for a in found) for layer in layers},
            part_rows=_summed([a.part_rows for a in found]),
            part_shared=_summed([a.part_shared for a in found]),
            flipped=self._unshard([a.flipped for a in found]),
            first_flip=self._unshard([a.first_flip for a in found]),
        )


def merge_stages(stages: Sequence[StageScored]) -> Scored:
    """What the pipeline stages know of one shard, together."""
    (logprobs,) = (stage.logprobs for stage in stages if stage.logprobs is not None)
    found = [stage.agreement for stage in stages if stage.agreement is not None]
    if not found:
        return Scored(logprobs, None)
    agreement = Agreement(
        num_rows=found[0].num_rows,
        shared={layer: n for stage in found for layer, n in stage.shared.items()},
        gate_mass={layer: mass for stage in found for layer, mass in stage.gate_mass.items()},
        part_rows=found[0].part_rows,
        part_shared=_summed([stage.part_shared for stage in found]),
        flipped=torch.stack([stage.flipped for stage in found]).any(0),
        first_flip=torch.stack([stage.first_flip for stage in found]).amin(0),
    )
    return Scored(logprobs, agreement)


def _summed(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*parts, strict=True)))


def _raise_first_error(refs: Sequence[Any], limit: float) -> None:
    """Raise the first failure at once: the other ranks may wait for the failed one for ever."""
    waiting = list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=limit)
        if not done:
            raise GetTimeoutError(f"{len(waiting)} workers did not answer")
        try:
            ray.get(done)
        except RayTaskError:
            _raise_if_dead(waiting)
            raise


def _raise_if_dead(refs: Sequence[Any]) -> None:
    """Collectives with a worker that died fail, sometimes before its death is known."""
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=DEATH_NOTICE_S) if refs else ([], [])
    for ref in done:
        with suppress(RayTaskError):
            ray.get(ref)


def _add(shards: Sequence[Updated]) -> Updated:
    """Sums add over ranks with different tokens; the gradient norm and rate are the same on all."""
    return Updated(
        totals={name: sum(s.totals[name] for s in shards) for name in shards[0].totals},
        maxima={name: max(s.maxima[name] for s in shards) for name in shards[0].maxima},
        grad_norm=shards[0].grad_norm,
        lr=shards[0].lr,
    )
