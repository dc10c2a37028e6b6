"""Sends requests to the engines with the fewest, and yields results as they finish."""

import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Protocol

import ray

from rltrain.actors.call_limits import LIMITS
from rltrain.actors.failures import (
    FACTOR,
    ActorFailed,
    AwaitedCall,
    check_nodes,
    get_all,
    timeout_failure,
)
from rltrain.actors.run_nodes import lost_node
from rltrain.rollout.dispatch_board import Board, RequestBatch, Running
from rltrain.rollout.requests import Rollout, SamplingParams

QUEUED = 2
"""An engine among several gets no further batch once it has this many times ``max_num_seqs``
requests. Its queued requests replace samples that finish. The other batches wait for an engine with
room."""
POLL_S = 0.1
ABORT_S = 30.0


ALL = "rollout.run"
"""What `CallLimits` calls the generation of a whole step."""


def poll_s() -> float:
    """How long a run waits that has nothing else to do."""
    return POLL_S


class Replacer(Protocol):
    """Starts engines again, in the same places of the list of engines."""

    @property
    def away(self) -> Collection[int]:
        """Engines that were lost and cannot generate yet."""

    def lost(self, engine: int, failure: ActorFailed) -> None:
        """An engine died or is silent. Raises ``failure`` if it is not started again."""

    def try_join(self) -> bool:
        """Have all engines that are away join, if they can now; no engine may be generating.

        Raises:
            ActorFailed: they cannot.
        """


class NoReplacer:
    """Every loss is an error."""

    away: Collection[int] = ()

    def lost(self, engine: int, failure: ActorFailed) -> None:
        raise failure

    def try_join(self) -> bool:
        raise AssertionError("no engine is away")


class Dispatcher:
    """Keeps a set of started engines busy.

    Args:
        engines: handles of ``RolloutEngine`` actors
        timeout_s: how long an engine with requests may take without finishing a call
        replacer: the calls of an engine that is lost wait at the front of the queue; those that are
            bound to it, and all if no other engine is left, wait until it has joined again
    """

    def __init__(
        self, engines: Sequence[Any], timeout_s: float, replacer: Replacer | None = None
    ) -> None:
        self.engines = engines
        self._timeout_s = timeout_s
        self._replacer = replacer or NoReplacer()
        self._boards: list[Board] = []  # of the runs that have begun and not ended
        self._since: dict[int, float] = {}  # see `Board`
        self.on_load: Callable[[int, int], None] = lambda engine, requests: None
        """Is told how many requests an engine has, of all runs, whenever that changes."""

    @property
    def is_generating(self) -> bool:
        """Whether an engine has calls of some run."""
        return any(board.running for board in self._boards)

    @property
    def num_requests(self) -> int:
        """That the engines have, of all runs."""
        return sum(board.load.total() for board in self._boards)

    def run(
        self,
        calls: Sequence[RequestBatch],
        sampling: SamplingParams,
        step: int,
        patience: Callable[[], float] = poll_s,
    ) -> Generator[tuple[RequestBatch, list[Rollout]] | None, None, None]:
        """Every batch and its rollouts, in the order in which they finish. It yields None if none
        finished for a moment, so that the caller can do other work. Several may run by turns.
        Closing it aborts the rest.

        Args:
            patience: how many seconds that moment may last

        Raises:
            ActorFailed: naming the engine that raised, or that died or is silent and is not
                replaced.
        """
        began, limit_s = time.monotonic(), LIMITS.limit(ALL, self._timeout_s)
        most = self._max_requests(calls, step)
        board = Board(deque(calls), len(self.engines), most, self._since)
        self._boards.append(board)
        lost = False
        try:
            while board.waiting or board.running:
                self._send(board, sampling)
                if not board.running:
                    if self.is_generating or not self._replacer.try_join():
                        check_nodes(AwaitedCall("rollout", "start"))
                        time.sleep(patience())
                    yield None
                    continue
                ready, _ = ray.wait(list(board.running), timeout=patience())
                for ref in ready:
                    one = board.running[ref]
                    try:
                        rollouts: list[Rollout] = self._get(ref, one.engine, step)
                    except ActorFailed as failure:
                        lost = True
                        self._lose(one.engine, failure)
                        continue
                    board.answered(ref)
                    self._tell_load(one.engine)
                    yield one.call, rollouts
                if not ready:
                    lost |= self._lose_silent(board, limit_s, step)
                    yield None
            if not lost:  # no engine is silent for longer than all of it takes
                LIMITS.took(ALL, time.monotonic() - began)
        finally:
            self._boards.remove(board)
            self._abort(board.running)
            for engine in {one.engine for one in board.running.values()}:
                self._tell_load(engine)

    def _send(self, board: Board, sampling: SamplingParams) -> None:
        while (placed := board.place(self._replacer.away)) is not None:
            (call, engine), name = placed, uuid.uuid4().hex
            ref = self.engines[engine].generate.remote(call.requests, sampling, name)
            board.sent(ref, Running(call, engine, name))
            self._tell_load(engine)

    def _tell_load(self, engine: int) -> None:
        self.on_load(engine, sum(board.load[engine] for board in self._boards))

    def _lose(self, engine: int, failure: ActorFailed) -> None:
        if failure.kind == "raised" or failure.of_peer:
            raise failure
        self._replacer.lost(engine, failure)
        for each in self._boards:
            each.take_back(engine)
        self._tell_load(engine)

    def _lose_silent(self, board: Board, limit_s: float, step: int) -> bool:
        """Whether an engine was."""
        found = False
        for engine in {one.engine for one in board.running.values()}:
            check_nodes(_wait(engine, step))
            if time.monotonic() - board.since[engine] > limit_s:
                wait = _wait(engine, step, learned=limit_s < self._timeout_s)
                wait = wait._replace(method=f"{wait.method}, {board.describe(engine)}")
                self._lose(engine, timeout_failure(wait, 1, 1, limit_s))
                found = True
        return found

    def _max_requests(self, calls: Sequence[RequestBatch], step: int) -> float:
        """The number of requests from which on an engine gets no further batch."""
        if len(self.engines) == 1 or all(call.engine is not None for call in calls):
            return math.inf
        here = [e for e in range(len(self.engines)) if e not in self._replacer.away]
        refs = {engine: self.engines[engine].capabilities.remote() for engine in here}
        most = []
        for engine, ref in refs.items():
            try:
                most.append(int(self._get(ref, engine, step)["max_num_seqs"]))
            except ActorFailed as failure:
                if failure.kind == "raised":
                    raise
                self._replacer.lost(engine, failure)
        return QUEUED * min(most, default=1)

    def _get(self, ref: Any, engine: int, step: int) -> Any:
        return get_all([ref], _wait(engine, step), self._timeout_s)[0]

    def _abort(self, running: dict[Any, Running]) -> None:
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
