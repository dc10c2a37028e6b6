"""Which calls wait, and which engine has which. Pure."""

import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltrain.rollout.requests import Request


@dataclass(frozen=True)
class RequestBatch:
    """Requests that are sent to an engine in one call."""

    groups: Sequence[int]  # indices of their groups in the step
    requests: Sequence[Request]
    engine: int | None = None  # None: whichever has room


@dataclass(frozen=True)
class Running:
    call: RequestBatch
    engine: int
    name: str  # the engine aborts it by this name


@dataclass
class Board:
    """The calls of one step that have not been answered, each in one place.

    Args:
        max_requests: the number of requests from which on an engine gets no further call
        since: by engine, when it last answered, or got work after having none; boards that share
            engines share it
    """

    waiting: deque[RequestBatch]
    num_engines: int
    max_requests: float
    since: dict[int, float] = field(default_factory=dict)
    running: dict[Any, Running] = field(default_factory=dict)
    """By reference to the answer."""
    load: Counter[int] = field(default_factory=Counter)
    """Requests that each engine has."""

    def place(self, away: Collection[int] = ()) -> tuple[RequestBatch, int] | None:
        """Take the first call that an engine has room for, and the engine. None: nothing can be
        sent now.

        Args:
            away: engines that get nothing
        """
        here = [engine for engine in range(self.num_engines) if engine not in away]
        freest = min(here, key=lambda e: (self.load[e], e), default=None)
        has_room = freest is not None and self.load[freest] < self.max_requests
        for call in self.waiting:
            engine = freest if call.engine is None and has_room else call.engine
            if engine in here:
                self.waiting.remove(call)
                return call, engine
            if call.engine is None:
                break  # no other would find room
        return None

    def sent(self, ref: Any, one: Running) -> None:
        if self.load[one.engine] == 0:
            self.since[one.engine] = time.monotonic()
        self.load[one.engine] += len(one.call.requests)
        self.running[ref] = one

    def answered(self, ref: Any) -> None:
        self.since[self._remove(ref).engine] = time.monotonic()

    def describe(self, engine: int) -> str:
        """How much the engine has to do, and how much waits, for an error message."""
        queued = sum(len(call.requests) for call in self.waiting)
        return f"{self.load[engine]} requests there, {queued} queued"

    def take_back(self, engine: int) -> None:
        """All calls of an engine go to the front of the queue, in their order."""
        refs = [ref for ref, one in self.running.items() if one.engine == engine]
        self.waiting.extendleft(reversed([self._remove(ref).call for ref in refs]))

    def _remove(self, ref: Any) -> Running:
        one = self.running.pop(ref)
        self.load[one.engine] -= len(one.call.requests)
        return one
