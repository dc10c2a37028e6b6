"""Reads a timeline.json as Perfetto does, and checks what it needs."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    events: list[Event]

    @property
    def tracks(self) -> dict[str, list[Event]]:
        """By name of the track, its slices in the order of time; of two that begin together the
        longer first."""
        names = {e["tid"]: e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.of("X"):
            found[names[event["tid"]]].append(event)
        return {name: sorted(slices, key=_order) for name, slices in found.items()}

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["ph"] == kind]

    @property
    def steps(self) -> list[str]:
        return [s["name"] for s in self.tracks["steps and phases"] if s["name"].startswith("step ")]

    def counts(self, engine: int) -> list[int]:
        name = f"engine {engine}"
        return [event["args"]["requests"] for event in self.of("C") if event["name"] == name]


def read_timeline(path: Path) -> Trace:
    """Of a run that ended, or was killed."""
    text = path.read_text()
    assert text.startswith("[\n"), text[:80]
    trace = Trace(json.loads(text if text.endswith("]\n") else text.rstrip(",\n") + "]"))
    for name, slices in trace.tracks.items():
        check_nested(name, slices)
    return trace


def check_nested(name: str, slices: list[Event]) -> None:
    """Each lies within those that are open when it begins, or after them."""
    open_until: list[int] = []
    for event in slices:
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert event["dur"] >= 0, (name, event)
        assert not open_until or end <= open_until[-1], f"{name}: {event} overlaps another"
        open_until.append(end)


def covered(outer: Event, slices: list[Event]) -> float:
    """The share of a slice that is below others; these do not overlap."""
    begin, end = outer["ts"], outer["ts"] + outer["dur"]
    inside = [s for s in slices if begin <= s["ts"] and s["ts"] + s["dur"] <= end and s != outer]
    return sum(s["dur"] for s in inside) / outer["dur"]


def overlap(one: Event, other: Event) -> bool:
    return max(one["ts"], other["ts"]) < min(one["ts"] + one["dur"], other["ts"] + other["dur"])


def _order(event: Event) -> tuple[int, int]:
    return event["ts"], -event["dur"]
