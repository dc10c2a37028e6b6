"""Rollouts ahead of training: engines generate later batches while the policy trains on one.

    step 2   policy: train on batch 2     engines: generate batch 3 with the weights after step 1
             both:   wait for batch 3, bring the weights after step 2 into the engines

Batches are trained on in the order of their prompts, so none is dropped and short responses are not
preferred. How old a batch will be when it is trained on is known when it is started, and bounded
(`admission`). Within the bound one is started when engines have room and no finished batch waits:
to generate further ahead than the policy can follow would make tokens older for nothing.

It has no thread. The driver advances what was started whenever it waits for the policy
(`rltrain.actors.failures.meanwhile`).

With ``trainer.max_staleness=0`` a batch is started when its step asks for it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import Tensor

from rltrain.actors.failures import AwaitedCall, check_nodes
from rltrain.batch import Batch
from rltrain.controller.admission import Admission, Schedule
from rltrain.controller.sampling import Sampled, Sampler, Sampling, Wait
from rltrain.rollout.dispatch import POLL_S
from rltrain.tracking.timers import StepTimer

WAIT = AwaitedCall("rollout", "batch")
"""What its waits are called where a node of the run, or Ray itself, is lost in one."""


@dataclass
class Started:
    """A batch that engines work on, or that waits for its step."""

    admission: Admission
    sampling: Sampling
    began: float
    waits_for: Wait = "generate"
    generated: float = 0.0
    """When its last response was there."""
    cursor: Mapping[str, Any] | None = None
    """Where the prompts stand behind its own, once all of these were drawn."""
    result: tuple[Sampled, dict[str, float]] | None = None


@dataclass
class BusyTime:
    """How long something was busy, as far as it was looked at."""

    clock: Callable[[], float] = time.monotonic
    _is_busy: bool = False
    _at: float | None = None
    _seconds: float = 0.0
    _since: float | None = None

    def look(self, is_busy: bool) -> None:
        """It was, from the look before to this one, what it was then."""
        now = self.clock()
        if self._at is not None and self._is_busy:
            self._seconds += now - self._at
        self._at, self._is_busy = now, is_busy
        if self._since is None:
            self._since = now

    def take_fraction(self) -> float:
        """Of the time since the last call."""
        assert self._at is not None and self._since is not None
        whole, busy = self._at - self._since, self._seconds
        self._since, self._seconds = self._at, 0.0
        return busy / whole if whole > 0 else 0.0


@dataclass
class RolloutPipeline:
    """
    Args:
        write: keeps a line of schedule.jsonl, by step
    """

    sampler: Sampler
    schedule: Schedule
    write: Callable[[int, Mapping[str, Any]], None]
    next_step: int
    """The first step whose batch was not started."""
    cursor: Mapping[str, Any]
    """Where the prompts stand behind those of the last step that was taken: a run that is resumed
    after it goes on from there."""
    capacity: int
    """Requests that the engines work on at once."""
    is_ahead: bool
    """Whether a batch may be started before its step asks for it."""
    synced_after: int = 0
    """The step whose weights the engines have, once there was a weight sync."""
    _started: deque[Started] = field(default_factory=deque)
    _steps: dict[int, int] = field(default_factory=dict)
    """By weight version, the step that it was made by."""
    _asked_for: int = 0
    """The step that waits for its batch, or has it."""
    _patience_s: float = 0.0
    _draws_at_once: bool = field(init=False)
    _busy: BusyTime = field(default_factory=BusyTime)
    """Of the engines."""

    def __post_init__(self) -> None:
        self._draws_at_once = not self.sampler.config.algorithm.dynamic_sampling.max_rounds

    def synced(self, step: int, version: int) -> None:
        """The engines have the weights after ``step``."""
        self.synced_after = step
        self._steps[version] = step

    def take(self, step: int, timer: StepTimer) -> tuple[Sampled, dict[str, float]]:
        """Wait for the batch of ``step``, and start those that may follow. Returns it, with what
        was seen of all that was sampled for it."""
        self._asked_for = step
        self._admit()
        batch = self._started[0]
        assert batch.admission.step == step, (batch.admission, step)
        untimed = set[Wait](get_args(Wait))
        while batch.result is None:
            phase = batch.waits_for
            untimed.discard(phase)
            with timer.phase(phase):
                self._advance_past(batch, phase)
        for phase in sorted(untimed):  # it took no time, and a step has them all
            with timer.phase(phase):
                pass
        self._started.popleft()
        assert batch.cursor is not None
        self.cursor = batch.cursor
        self._busy.look(self.sampler.generator.is_generating)
        sampled, metrics = batch.result
        return sampled, metrics | self._age(step, sampled.batch) | self._ahead(batch)

    def token_ages(self, step: int, batch: Batch) -> Tensor:
        """How many steps the policy of ``step`` is ahead of the weights that sampled each token.
        # [N]"""
        (versions,) = batch.require("token_versions")
        made_by = versions.clone()
        for version in versions.unique().tolist():
            made_by[versions == version] = self._steps[version]
        return step - 1 - made_by

    def work(self) -> None:
        """Advance what was started, and start what may be, without waiting for anything."""
        self._advance(0.0)

    def drain(self) -> None:
        """Before a weight sync: wait until no engine generates. What waits for an engine that was
        lost goes on after it."""
        while self.sampler.generator.is_generating or any(
            batch.result is None and batch.waits_for == "reward" for batch in self._started
        ):
            self._advance(POLL_S)

    def close(self) -> None:
        """Abort what was started."""
        for batch in self._started:
            batch.sampling.close()
        self._started.clear()

    def _admit(self) -> None:
        """Start batches, one after the other: each begins behind the prompts of the one before."""
        while not self._started or self._started[-1].cursor is not None:
            step, after = self.next_step, self.synced_after
            admission = self.schedule.admit(step, after, is_wanted=self._is_wanted(step))
            if admission is None:
                return
            sampling = self.sampler.sample(step, lambda: self._patience_s)
            self._started.append(Started(admission, sampling, time.monotonic()))
            self.write(step, admission.row())
            self.next_step += 1
            self._advance_one(self._started[-1], 0.0)
            self._busy.look(self.sampler.generator.is_generating)

    def _is_wanted(self, step: int) -> bool:
        """Whether the batch of ``step`` is of use now."""
        if step == self._asked_for:
            return True
        later = [batch for batch in self._started if batch.admission.step > self._asked_for]
        has_room = self.sampler.generator.num_requests < self.capacity
        return self.is_ahead and has_room and not any(batch.generated for batch in later)

    def _advance_past(self, batch: Started, phase: Wait) -> None:
        """Until the batch no longer waits for this."""
        while batch.result is None and batch.waits_for == phase:
            self._advance(POLL_S)

    def _advance(self, patience_s: float) -> None:
        """Advance all that was started.

        Args:
            patience_s: how long the first batch may wait; the others do not

        Raises:
            ActorFailed: as `check_nodes`, and as the generation of a batch.
        """
        check_nodes(WAIT)
        for batch in list(self._started):
            if batch.result is None:
                self._advance_one(batch, patience_s)
                patience_s = 0.0
        self._admit()
        self._busy.look(self.sampler.generator.is_generating)

    def _advance_one(self, batch: Started, patience_s: float) -> None:
        self._patience_s = patience_s
        try:
            batch.waits_for = next(batch.sampling)
        except StopIteration as end:
            batch.result = end.value
        if not batch.generated and (batch.waits_for == "reward" or batch.result is not None):
            batch.generated = time.monotonic()
        if batch.cursor is None and (self._draws_at_once or batch.result is not None):
            batch.cursor = self.sampler.prompts.state_dict()

    def _age(self, step: int, batch: Batch) -> dict[str, float]:
        """How many steps the policy is ahead of the weights that sampled the tokens of a batch."""
        of_responses = self.token_ages(step, batch)[batch.response_mask]
        ages, counts = of_responses.unique(return_counts=True)
        tokens = Counter(dict(zip(ages.tolist(), counts.tolist(), strict=True)))
        by_age = {str(age): tokens[age] for age in sorted(tokens)}
        self.write(step, {"event": "trained", "tokens_by_age": by_age})
        summed = sum(age * count for age, count in tokens.items())
        return {
            "rollout/staleness": summed / max(1, tokens.total()),
            "rollout/staleness_max": float(max(tokens, default=0)),
        }

    def _ahead(self, batch: Started) -> dict[str, float]:
        ready = sum(one.result is not None for one in self._started)
        return {
            "rollout/batches_ready": float(ready),
            "rollout/generate_seconds": batch.generated - batch.began,
            "rollout/engines_busy_fraction": self._busy.take_fraction(),
        }
