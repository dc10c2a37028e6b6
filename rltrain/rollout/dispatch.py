"""Sends requests to the engines with the fewest, and yields results as they finish."""

import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rltrain.actors.call_limits import LIMITS
from rltrain.actors.failures import FACTOR, AwaitedCall, check_nodes, get_all, timeout_failure
from rltrain.actors.run_nodes import lost_node
from rltrain.rollout.requests import Request, Rollout, SamplingParams

QUEUED = 2
"""An engine among several gets no further batch once it has this many times ``max_num_seqs``
requests. Its queued requests replace samples that finish. The other batches wait for an engine with
room."""
POLL_S = 0.1
ABORT_S = 30.0


@dataclass(frozen=True)
class RequestBatch:
    """Requests that are sent to an engine in one call."""

    groups: Sequence[int]  # indices of their groups in the step
    requests: Sequence[Request]
    engine: int | None = None  # None: whichever has room


@dataclass(frozen=True)
class _Running:
    call: RequestBatch
    engine: int
    name: str  # the engine aborts it by this name


ALL = "rollout.run"
"""What `CallLimits` calls the generation of a whole step."""


class Dispatcher:
    """Keeps a set of started engines busy.

    Args:
        engines: handles of ``RolloutEngine`` actors
        timeout_s: how long an engine with requests may take without finishing a call
    """

    def __init__(self, engines: Sequence[Any], timeout_s: float) -> None:
        self.engines = list(engines)
        self._timeout_s = timeout_s

    def run(
        self, calls: Sequence[RequestBatch], sampling: SamplingParams, step: int
    ) -> Generator[tuple[RequestBatch, list[Rollout]] | None, None, None]:
        """Every batch and its rollouts, in the order in which they finish. It yields None if none
        finished for ``POLL_S``, so that the caller can do other work. Closing it aborts the rest.

        Raises:
            ActorFailed: naming the engine that raised, died or is silent.
        """
        waiting, running = deque(calls), dict[Any, _Running]()
        began, limit_s = time.monotonic(), LIMITS.limit(ALL, self._timeout_s)
        max_requests = self._max_requests(calls, step)
        load = Counter(dict.fromkeys(range(len(self.engines)), 0))
        last_answer = dict.fromkeys(load, time.monotonic())
        try:
            while waiting or running:
                while waiting and (engine := _place(waiting[0], load, max_requests)) is not None:
                    call, name = waiting.popleft(), uuid.uuid4().hex
                    ref = self.engines[engine].generate.remote(call.requests, sampling, name)
                    running[ref] = _Running(call, engine, name)
                    load[engine] += len(call.requests)
                ready, _ = ray.wait(list(running), timeout=POLL_S)
                for ref in ready:
                    engine, call = running[ref].engine, running[ref].call
                    rollouts: list[Rollout] = self._get(ref, engine, step)
                    del running[ref]
                    load[engine] -= len(call.requests)
                    last_answer[engine] = time.monotonic()
                    yield call, rollouts
                if not ready:
                    for engine in {one.engine for one in running.values()}:
                        check_nodes(_wait(engine, step))
                        if time.monotonic() - last_answer[engine] > limit_s:
                            wait = _wait(engine, step, learned=limit_s < self._timeout_s)
                            raise timeout_failure(wait, 1, 1, limit_s)
                    yield None
            # No engine is silent for longer than all of it takes.
            LIMITS.took(ALL, time.monotonic() - began)
        finally:
            self._abort(running)

    def _max_requests(self, calls: Sequence[RequestBatch], step: int) -> float:
        """The number of requests from which on an engine gets no further batch."""
        if len(self.engines) == 1 or all(call.engine is not None for call in calls):
            return math.inf
        refs = [engine.capabilities.remote() for engine in self.engines]
        capabilities = [self._get(ref, engine, step) for engine, ref in enumerate(refs)]
        return QUEUED * min(int(engine["max_num_seqs"]) for engine in capabilities)

    def _get(self, ref: Any, engine: int, step: int) -> Any:
        return get_all([ref], _wait(engine, step), self._timeout_s)[0]

    def _abort(self, running: dict[Any, _Running]) -> None:
        """Abort what runs, and wait until the engines have done so or ``ABORT_S`` is over."""
        names: dict[int, list[str]] = {}
        for one in running.values():
            names.setdefault(one.engine, []).append(one.name)
        refs = [self.engines[engine].abort.remote(calls) for engine, calls in names.items()]
        if refs:
            refs += running
            limit = 0.0 if lost_node() else ABORT_S
            ray.wait(refs, num_returns=len(refs), timeout=limit)


def _wait(engine: int, step: int, *, learned: bool = False) -> AwaitedCall:
    call = AwaitedCall("rollout", f"generate, engine {engine}, step {step}")
    return call._replace(key=FACTOR) if learned else call


def _place(call: RequestBatch, load: Counter[int], max_requests: float) -> int | None:
    """The engine that gets the batch now; None if none has room."""
    if call.engine is not None:
        return call.engine
    engine = min(load, key=lambda e: (load[e], e))
    return engine if load[engine] < max_requests else None
