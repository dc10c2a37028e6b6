"""timeline.json: what run, engines and ranks did and when, for ui.perfetto.dev.

The driver writes it of what it sees anyway: a call was sent, an answer came. Nothing is asked of
engines or ranks. Events are kept in memory, and written once a step.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rltrain.config.durable import explained, write_durably
from rltrain.tracking import trace_events as trace
from rltrain.tracking.trace_events import RUN, Event, Span, Track

MOST_RANKS = 16
"""Further ranks of a role have no track: the file would grow with the cluster."""
MOST_COUNTS = 50
"""Of the numbers of requests that an engine had in a step."""


@dataclass
class Load:
    """An engine that has requests."""

    since: int
    requests: int
    sent: int
    """Since it had none."""


class Timeline:
    """Appends to the file of a run.

    Args:
        first_step: 0 begins a new file. Else the run goes on: all of the file is kept, and steps
            that are taken again are there twice, each at its own time.
        clock: in seconds, and never goes back

    Raises:
        OSError: also by `end_step` and `close`: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        first_step: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._clock = path, clock
        self._epoch = wall_clock() - clock()
        goes_on = first_step > 0 and path.is_file()
        write_durably(path, "[\n" + (trace.earlier_lines(path.read_bytes()) if goes_on else ""))
        self._file = path.open("a", encoding="utf-8")
        self._named: set[Track] = set()
        self._names: list[Event] = []
        self._events: list[Event] = []
        self._counts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By engine: from when on it had how many requests."""
        self._loads: dict[int, Load] = {}
        self._phase: tuple[str, int] | None = None
        self._step: tuple[int, int] | None = None
        if goes_on:
            self._mark(f"goes on after step {first_step - 1}")

    # The run

    def begin_step(self, step: int) -> None:
        self.phase(None)
        self._step = step, self._now()

    def phase(self, name: str | None) -> None:
        """The phase before it ends, and ``name`` begins, if it is one."""
        now = self._now()
        if self._phase is not None:
            self._add(Span(RUN, self._phase[0], self._phase[1], now))
        self._phase = None if name is None else (name, now)

    def end_step(self) -> None:
        """Also of what is no step; write what has come to an end."""
        self.phase(None)
        if self._step is not None:
            step, began = self._step
            self._add(Span(RUN, f"step {step}", began, self._now()))
            self._step = None
        self._write("".join(map(trace.line_of, self._taken())))

    # Engines and ranks

    def load(self, engine: int, requests: int) -> None:
        """An engine has this many requests from now on."""
        now, load = self._now(), self._loads.get(engine)
        self._counts[engine].append((now, requests))
        if load is None and requests > 0:
            self._loads[engine] = Load(now, requests, requests)
        elif load is not None and requests == 0:
            del self._loads[engine]
            sent = {"requests": load.sent}
            self._add(Span(trace.engine(engine), "generate", load.since, now, sent))
        elif load is not None:
            load.sent += max(0, requests - load.requests)
            load.requests = requests

    def answered(self, role: str, rank: int, method: str, began: float) -> None:
        """A rank has answered a call that it got at ``began``, by the clock."""
        if rank < MOST_RANKS:
            self._add(Span(trace.rank(role, rank), method, self._at(began), self._now()))

    @contextmanager
    def weight_sync(self, engines: int, ranks: int) -> Iterator[None]:
        """Within, all engines and ranks of the policy are busy with it."""
        began = self._now()
        try:
            yield
        finally:
            tracks = [trace.engine(number) for number in range(engines)]
            tracks += [trace.rank("policy", number) for number in range(min(ranks, MOST_RANKS))]
            for track in tracks:
                self._add(Span(track, "weight_sync", began, self._now()))

    def close(self, state: str) -> None:
        """What has not ended ends here; close the array, and the file.

        Args:
            state: how the run ended
        """
        for engine in list(self._loads):
            self.load(engine, 0)
        self.end_step()
        self._mark(state)
        last = "".join(map(trace.line_of, self._taken()))
        try:
            self._write(last.removesuffix(",\n") + "\n]\n")
        finally:
            with suppress(OSError):  # of what could not be written, which was said
                self._file.close()

    def _now(self) -> int:
        return self._at(self._clock())

    def _at(self, seconds: float) -> int:
        """In microseconds since 1970."""
        return int((self._epoch + seconds) * 1e6)

    def _add(self, span: Span) -> None:
        self._name(span.track)
        self._events.append(trace.slice_of(span))

    def _mark(self, name: str) -> None:
        self._name(RUN)
        self._events.append(trace.mark(RUN, name, self._now()))

    def _name(self, track: Track) -> None:
        if track not in self._named:
            self._named.add(track)
            self._names += trace.names(track)

    def _taken(self) -> list[Event]:
        """All events since the last call."""
        counts = [
            trace.count_of(trace.engine(engine), at, requests)
            for engine, of_one in self._counts.items()
            for at, requests in trace.thinned(of_one, MOST_COUNTS)
        ]
        events = self._names + trace.in_order([*self._events, *counts])
        self._names, self._events = [], []
        self._counts.clear()
        return events

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise explained(error, self._path) from error
