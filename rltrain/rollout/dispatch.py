"""Hands requests to whichever engine has room and yields results as they come."""

import math
import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray

from rltrain.rollout.types import Request, Rollout, SamplingParams

QUEUED = 2
"""Of several engines each has at most so many times the requests it runs at once: where samples of
unfinished groups have ended others are there to take their place, and what is left over goes to the
engine that is done first."""
POLL_S = 0.1
ABORT_S = 30.0


@dataclass(frozen=True)
class Call:
    """Requests that an engine gets together."""

    groups: Sequence[int]  # which of the step's they are
    requests: Sequence[Request]
    engine: int | None = None  # None: whichever has room


class Dispatcher:
    """Keeps a set of started engines busy.

    Args:
        engines: handles of ``RolloutEngine`` actors
        timeout_s: how long an engine with requests may say nothing
    """

    def __init__(self, engines: Sequence[Any], timeout_s: float) -> None:
        self.engines = list(engines)
        self._timeout_s = timeout_s

    def run(
        self, calls: Sequence[Call], sampling: SamplingParams, step: int
    ) -> Generator[tuple[Call, list[Rollout]] | None, None, None]:
        """Every call and its rollouts in the order in which they finish; None when none did for
        ``POLL_S``, so that the caller may do something else. Closing the iterator aborts the rest.

        Raises:
            RuntimeError: naming the engine that died or is silent.
        """
        waiting, running = deque(calls), dict[Any, tuple[int, Call]]()
        load = Counter(dict.fromkeys(range(len(self.engines)), 0))
        heard = dict.fromkeys(load, time.monotonic())
        try:
            while waiting or running:
                while waiting and (engine := self._place(waiting[0], load)) is not None:
                    call = waiting.popleft()
                    ref = self.engines[engine].generate.remote(call.requests, sampling)
                    running[ref] = engine, call
                    load[engine] += len(call.requests)
                ready, _ = ray.wait(list(running), timeout=POLL_S)
                for ref in ready:
                    engine, call = running[ref]
                    rollouts = self._get(ref, engine, step)
                    del running[ref]
                    load[engine] -= len(call.requests)
                    heard[engine] = time.monotonic()
                    yield call, rollouts
                if not ready:
                    self._check_silence(
                        {engine: heard[engine] for engine, _ in running.values()}, step
                    )
                    yield None
        finally:
            self._abort(running)

    def _place(self, call: Call, load: Counter[int]) -> int | None:
        """The engine that is to have the call now."""
        if call.engine is not None:
            return call.engine
        engine = min(load, key=lambda e: (load[e], e))
        return engine if load[engine] < self._most else None

    @cached_property
    def _most(self) -> float:
        if len(self.engines) == 1:
            return math.inf
        asked = [engine.capabilities.remote() for engine in self.engines]
        return QUEUED * min(
            found["max_num_seqs"] for found in ray.get(asked, timeout=self._timeout_s)
        )

    def _get(self, ref: Any, engine: int, step: int) -> list[Rollout]:
        try:
            rollouts: list[Rollout] = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(
                f"rollout engine {engine} died in step {step}, out of memory perhaps; its log and "
                "the kernel's (dmesg) say more"
            ) from error
        return rollouts

    def _check_silence(self, heard: dict[int, float], step: int) -> None:
        for engine, when in heard.items():
            if time.monotonic() - when > self._timeout_s:
                raise RuntimeError(
                    f"rollout engine {engine} did not answer within {self._timeout_s:g} s in step "
                    f"{step}: raise cluster.call_timeout_s, or look for a hang in its log"
                )

    def _abort(self, running: dict[Any, tuple[int, Call]]) -> None:
        """No request is in flight afterwards, unless an engine hangs."""
        engines = {engine for engine, _ in running.values()}
        refs = [*running, *(self.engines[engine].abort.remote() for engine in engines)]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=ABORT_S)
