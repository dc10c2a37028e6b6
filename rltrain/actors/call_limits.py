"""How long a call of an actor may take, learned from its own earlier ones.

A limit that holds for every model and machine is hours long, and so would be the wait for an actor
that hangs. A call that takes twenty times as long as it mostly does, hangs.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

ENOUGH = 3
"""Calls before anything is known; the first ones compile."""
REMEMBERED = 50


@dataclass
class CallLimits:
    """Seconds of calls, by the phase of the step that they belong to: an evaluation generates more
    than a step.

    Args:
        factor: times the median of earlier calls; None: nothing is learned
        floor_s: no limit is shorter
    """

    factor: float | None = None
    floor_s: float = 300.0
    phase: str | None = None
    """What the run does now."""
    _seconds: dict[tuple[str | None, str], deque[float]] = field(default_factory=dict)

    def took(self, call: str, seconds: float) -> None:
        """A call has returned."""
        known = self._seconds.setdefault((self.phase, call), deque(maxlen=REMEMBERED))
        known.append(seconds)

    def limit(self, call: str, most_s: float) -> float:
        """Seconds, ``most_s`` at most."""
        known = self._seconds.get((self.phase, call), ())
        if self.factor is None or len(known) < ENOUGH:
            return most_s
        return min(most_s, max(self.floor_s, self.factor * median(known)))


LIMITS = CallLimits()
"""Of this process, which is the controller of one run at a time."""


def learn_anew(factor: float | None, floor_s: float) -> None:
    """A run begins."""
    vars(LIMITS).update(vars(CallLimits(factor, floor_s)))
