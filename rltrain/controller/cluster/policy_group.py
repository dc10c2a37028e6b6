"""The controller's handle on the policy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.parallel.token_layout import TokenGrid, padded_lengths
from rltrain.policy.types import Agreement, Scored, StageScored, Updated
from rltrain.routing.flips import WideFlips, join_flips, sum_flips


class PolicyGroup(WorkerGroup):
    """All policy workers as one."""

    role = "policy"

    @property
    def stored(self) -> dict[str, tuple[str, str]]:
        """A reference that was never refreshed is the model the run started from."""
        refreshed = self._config.algorithm.kl.refresh_every > 0
        reference = {"reference": ("save_reference", "load_reference")} if refreshed else {}
        return super().stored | reference

    def score(
        self,
        *,
        routing: Literal["native", "rollout", "recorded"],
        measure: bool = False,
        record: bool = False,
        of: Literal["policy", "reference"] = "policy",
    ) -> Scored:
        """Log-probabilities of the whole batch; see `PolicyWorker.score`."""
        answers = self._ask("score", routing=routing, measure=measure, record=record, of=of)
        shards = [merge_stages(stages) for stages in answers]
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

        Args:
            fields: token fields of the whole batch that `begin_step` did not have  # [N] each
            kl_coef: see `PolicyWorker.update`
        """
        return self._update(fields, routing=routing, kl_coef=kl_coef)

    def wide_flips(self, narrow: Mapping[int, int]) -> WideFlips:
        """Of the whole batch; see `PolicyWorker.wide_flips`."""
        answers = self._by_dp_rank(self.call("wide_flips", narrow))
        found = [
            replace(part, rows=self._batch.token_index(rows).numpy()[part.rows])
            for rows, stages in zip(self._plan.shards, answers, strict=True)
            for part in stages
        ]
        return join_flips(found)

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
            load={n: torch.stack([a.load[n] for a in found]).sum(0) for n in found[0].load},
            num_judged=sum(a.num_judged for a in found),
            flips={n: sum_flips([a.flips[n] for a in found]) for n in found[0].flips},
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
        load={layer: load for stage in found for layer, load in stage.load.items()},
        num_judged=found[0].num_judged,
        flips={layer: flips for stage in found for layer, flips in stage.flips.items()},
    )
    return Scored(logprobs, agreement)


def _summed(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*parts, strict=True)))
