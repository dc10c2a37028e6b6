"""Events of Chrome's trace format, as Perfetto draws them. Pure.

A track is a thread of a process there, and a process is a heading over tracks. Slices of one track
lie within each other or apart. Times are integers, in microseconds since 1970: rounded times keep
slices within those that hold them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Event = dict[str, Any]
T = TypeVar("T")

PROCESSES = {"run": 1, "rollout": 2, "policy": 3, "critic": 4}
"""The headings, in their order on the page."""
TRACKS_OF_ONE = 100_000
"""No two tracks of a trace have the same tid: readers may ignore the pid."""


@dataclass(frozen=True)
class Track:
    process: str
    """One of `PROCESSES`."""
    name: str
    number: int = 0
    """Among those of its process."""

    @property
    def place(self) -> dict[str, int]:
        pid = PROCESSES[self.process]
        return {"pid": pid, "tid": pid * TRACKS_OF_ONE + self.number}


RUN = Track("run", "steps and phases")


def engine(number: int) -> Track:
    return Track("rollout", f"engine {number}", number)


def rank(role: str, number: int) -> Track:
    return Track(role, f"{role} rank {number}", number)


@dataclass(frozen=True)
class Span:
    """What went on from ``begin`` to ``end``."""

    track: Track
    name: str
    begin: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)


def slice_of(span: Span) -> Event:
    """One event with its duration, not one for each end: where a run was killed, none is left open
    that what follows would seem to lie in."""
    event = {"name": span.name, "ph": "X", "ts": span.begin, "dur": span.end - span.begin}
    return event | span.track.place | ({"args": dict(span.args)} if span.args else {})


def count_of(track: Track, at: int, value: int) -> Event:
    """How many requests an engine has, from then on. Perfetto shows it as ``engine 0 requests``."""
    # The name has the engine, since a counter belongs to a process.
    return {"name": track.name, "ph": "C", "ts": at, "args": {"requests": value}} | track.place


def mark(track: Track, name: str, at: int) -> Event:
    """Something that has no length."""
    return {"name": name, "ph": "i", "s": "t", "ts": at} | track.place


def names(track: Track) -> list[Event]:
    """What a track and its heading are called, and their order."""
    said = {
        "process_name": {"name": track.process},
        "process_sort_index": {"sort_index": track.place["pid"]},
        "thread_name": {"name": track.name},
        "thread_sort_index": {"sort_index": track.number},
    }
    return [{"name": what, "ph": "M", "args": args} | track.place for what, args in said.items()]


def in_order(events: Iterable[Event]) -> list[Event]:
    """By time. Of two slices that begin together the longer comes first, as it holds the other."""
    return sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0)))


def thinned(points: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of them, evenly spread, with the first and the last; ``most`` is above 1."""
    if len(points) <= most:
        return list(points)
    return [points[n * (len(points) - 1) // (most - 1)] for n in range(most)]


# The file: an array with an event in each line. The bracket at its end may be missing.


def line_of(event: Event) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"


def earlier_lines(content: bytes) -> str:
    """The lines of a file that others can follow, without its brackets and what is torn."""
    found = (line.rstrip(b",") for line in content.split(b"\n"))
    return "".join(f"{line.decode()},\n" for line in found if _is_event(line))


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode()), dict)
    except ValueError:
        return False
