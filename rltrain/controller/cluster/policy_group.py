"""The controller's handle on the policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rltrain.config.rollout import Transport
from rltrain.controller.cluster.worker_group import WorkerGroup, Written, in_folder
from rltrain.parallel.token_layout import TokenGrid, padded_lengths
from rltrain.policy.types import Agreement, Place, Scored, StageScored, Updated
from rltrain.routing.flips import WideFlips, join_flips, sum_flips
from rltrain.weights.sync.broadcast import SenderLink
from rltrain.weights.sync.stream import Bucket

if TYPE_CHECKING:  # see `WorkerGroup`
    from rltrain.policy.worker import PolicyWorker  # noqa: F401  # ruff sees no base class

REFERENCE = "reference"
"""The folder of the reference's parameters in a checkpoint."""


class PolicyGroup(WorkerGroup["PolicyWorker"]):
    """All policy workers as one."""

    role = "policy"

    # The reference model; a checkpoint has it if it was refreshed, else it is the initial model

    @property
    def _saves_reference(self) -> bool:
        return self._config.algorithm.kl.refresh_every > 0

    @property
    def folders(self) -> list[str]:
        return [*super().folders, *([REFERENCE] if self._saves_reference else [])]

    def save(self, checkpoint: Path) -> list[Written]:
        written = super().save(checkpoint)
        if not self._saves_reference:
            return written
        folder = str(checkpoint / REFERENCE)
        more = in_folder(REFERENCE, self._call(lambda worker: worker.save_reference(folder)))
        return [{**files, **others} for files, others in zip(written, more, strict=True)]

    def begin_save(self, checkpoint: Path) -> None:
        super().begin_save(checkpoint)
        if self._saves_reference:
            folder = str(checkpoint / REFERENCE)
            self._call(lambda worker: worker.begin_reference_save(folder))

    def load(self, checkpoint: Path) -> None:
        super().load(checkpoint)
        if self._saves_reference:
            self._call(lambda worker: worker.load_reference(str(checkpoint / REFERENCE)))

    def refresh_reference(self) -> None:
        """See `PolicyWorker.refresh_reference`."""
        self._call(lambda worker: worker.refresh_reference())

    # Weights

    def save_weights(self, checkpoint: Path) -> list[Written]:
        """As `save`, the policy's parameters alone."""
        folder = str(checkpoint / self.role)
        return in_folder(self.role, self._call(lambda worker: worker.save_weights(folder)))

    def export(self, path: str, dtype: str) -> None:
        """See `PolicyWorker.export`."""
        self._call(lambda worker: worker.export(path, dtype))

    def export_for_engine(self, path: str) -> None:
        """See `PolicyWorker.export_for_engine`."""
        self._call(lambda worker: worker.export_for_engine(path))

    def device_names(self) -> list[str]:
        """By rank; see `PolicyWorker.device_name`."""
        return self._call(lambda worker: worker.device_name())

    def join_receivers(self, links: Mapping[int, SenderLink]) -> list[Any]:
        """See `PolicyWorker.join_receivers`; ``links`` is by rank. Returns references to the
        answers, by rank."""
        return self._send(
            self._all_ranks,
            lambda worker, rank: worker.join_receivers(links.get(rank), list(links)),
        )[1]

    def begin_weight_stream(
        self, dtype: str, transport: Transport, receivers: Sequence[str]
    ) -> None:
        """See `PolicyWorker.begin_weight_stream`."""
        self._call(lambda worker: worker.begin_weight_stream(dtype, transport, receivers))

    def next_weight_buckets(self, ranks: Sequence[int]) -> Callable[[], list[Bucket]]:
        """Have the ranks of a stream fill its next bucket; see `BucketStream.next_bucket`.

        Returns:
            A function that waits for it: one from each rank that sends, none after the last.
        """
        wait = self._begin(ranks, lambda worker, _: worker.next_weight_bucket())
        return lambda: [bucket for bucket in wait() if bucket is not None]

    def end_weight_stream(self) -> None:
        """See `PolicyWorker.end_weight_stream`."""
        self._call(lambda worker: worker.end_weight_stream())

    # A step

    def native_losses(self) -> list[str]:
        """See `PolicyWorker.native_losses`; every rank has the same."""
        return self._call(lambda worker: worker.native_losses())[0]

    def score(
        self,
        *,
        routing: Literal["native", "rollout", "recorded"],
        measure: bool = False,
        record: bool = False,
        of: Literal["policy", "reference"] = "policy",
    ) -> Scored:
        """Log-probabilities of the whole batch; see `PolicyWorker.score`."""
        answers = self._score(
            lambda worker, plan: worker.score(
                plan, routing=routing, measure=measure, record=record, of=of
            )
        )
        shards = [merge_stages(stages) for stages in answers]
        logprobs = self._unshard([scored.logprobs for scored in shards])
        agreements = [scored.agreement for scored in shards if scored.agreement is not None]
        merged = self._merge(agreements) if agreements else None
        return Scored(logprobs, merged, _pair([scored.replayed for scored in shards]))

    def locate(self, *, routing: Literal["native", "rollout"]) -> Place | None:
        """The first number in a scoring pass that is not finite; its token is one of the batch."""
        plan = self._plan.scoring
        answers = self._call_by_rank(
            lambda worker, rank: worker.locate(plan[self._dp_ranks[rank]], routing=routing)
        )
        found = [
            replace(place, token=int(self._batch.token_index(self._plan.shards[dp])[place.token]))
            for dp, place in zip(self._dp_ranks, answers, strict=True)
            if place is not None
        ]
        return min(found, key=lambda place: (place.layer, place.token), default=None)

    def update(
        self,
        fields: dict[str, Tensor],
        *,
        routing: Literal["native", "rollout", "recorded"],
        kl_coef: float = 0.0,
    ) -> list[Updated]:
        """One optimizer update per mini-batch that has a token in the loss.

        Args:
            fields: token fields of the whole batch that `begin_step` did not have  # [N] each
            kl_coef: see `PolicyWorker.update`
        """
        return self._update(
            fields,
            lambda worker, plan, shard: worker.update(
                plan, shard, routing=routing, kl_coef=kl_coef
            ),
        )

    def wide_flips(self, narrow: Mapping[int, int]) -> WideFlips:
        """Of the whole batch; see `PolicyWorker.wide_flips`."""
        answers = self._by_dp_rank(self._call(lambda worker: worker.wide_flips(narrow)))
        flips = [
            replace(part, rows=self._batch.token_index(rows).numpy()[part.rows])
            for rows, stages in zip(self._plan.shards, answers, strict=True)
            for part in stages
        ]
        return join_flips(flips)

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

    def _merge(self, agreements: Sequence[Agreement]) -> Agreement:
        layers = agreements[0].shared
        return Agreement(
            num_rows=sum(a.num_rows for a in agreements),
            shared={layer: sum(a.shared[layer] for a in agreements) for layer in layers},
            gate_mass={layer: sum(a.gate_mass[layer] for a in agreements) for layer in layers},
            part_rows=_summed([a.part_rows for a in agreements]),
            part_shared=_summed([a.part_shared for a in agreements]),
            flipped=self._unshard([a.flipped for a in agreements]),
            first_flip=self._unshard([a.first_flip for a in agreements]),
            load={
                n: torch.stack([a.load[n] for a in agreements]).sum(0) for n in agreements[0].load
            },
            num_judged=sum(a.num_judged for a in agreements),
            flips={n: sum_flips([a.flips[n] for a in agreements]) for n in agreements[0].flips},
        )


def merge_stages(stages: Sequence[StageScored]) -> Scored:
    """What the pipeline stages know of one shard, together."""
    (logprobs,) = (stage.logprobs for stage in stages if stage.logprobs is not None)
    agreements = [stage.agreement for stage in stages if stage.agreement is not None]
    replayed = _pair([stage.replayed for stage in stages])
    if not agreements:
        return Scored(logprobs, None, replayed)
    agreement = Agreement(
        num_rows=agreements[0].num_rows,
        shared={layer: n for stage in agreements for layer, n in stage.shared.items()},
        gate_mass={layer: mass for stage in agreements for layer, mass in stage.gate_mass.items()},
        part_rows=agreements[0].part_rows,
        part_shared=_summed([stage.part_shared for stage in agreements]),
        flipped=torch.stack([stage.flipped for stage in agreements]).any(0),
        first_flip=torch.stack([stage.first_flip for stage in agreements]).amin(0),
        load={layer: load for stage in agreements for layer, load in stage.load.items()},
        num_judged=agreements[0].num_judged,
        flips={layer: flips for stage in agreements for layer, flips in stage.flips.items()},
    )
    return Scored(logprobs, agreement, replayed)


def _pair(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The sums of both."""
    return sum(first for first, _ in parts), sum(second for _, second in parts)


def _summed(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*parts, strict=True)))
