"""How long a run will take. What only some of its steps do is counted with a mean of its own."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

RECENT_STEPS = 20

Due = Callable[[int], bool]
"""Whether a step does something, such as an evaluation."""


@dataclass(frozen=True)
class TimeLeft:
    """Seconds until the last step is done. ``at_least``: a part that is due was never timed."""

    seconds: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{duration(self.seconds)}{'+' * self.at_least}"


@dataclass
class Eta:
    """Told of phases as they begin and of steps as they end, it says what time is left.

    Args:
        num_steps: of the whole run
        due: by phase, for those that only some steps have; others are part of every step
    """

    num_steps: int
    due: Mapping[str, Due] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._num_timed = 0
        self._parts = {name: deque[float](maxlen=RECENT_STEPS) for name in self.due}
        self._of_this_step: dict[str, float] = {}
        self._last: float | None = None
        self._open: tuple[str, float] | None = None

    def phase(self, name: str | None) -> None:
        """What is done from now on; None: nothing that has a name."""
        now = self.clock()
        if self._open is not None:
            open_name, began = self._open
            self._of_this_step[open_name] = self._of_this_step.get(open_name, 0.0) + now - began
        self._open = (name, now) if name is not None and name in self.due else None

    def step(self, step: int) -> TimeLeft | None:
        """A step has ended. Start-up is not a step: None until the time of one is known."""
        self.phase(None)
        now = self.clock()
        for name, seconds in self._of_this_step.items():
            self._parts[name].append(seconds)
        if self._last is not None:
            self._steps.append(now - self._last - sum(self._of_this_step.values()))
            self._num_timed += 1
        if self._num_timed == 2:  # the first step warms up: kernels, caches, allocators
            self._steps.popleft()
            self._num_timed += 1
        self._of_this_step, self._last = {}, now
        return self._time_left(step)

    def _time_left(self, step: int) -> TimeLeft | None:
        left = range(step + 1, self.num_steps + 1)
        if not self._steps and left:
            return None
        seconds = len(left) * (sum(self._steps) / len(self._steps) if left else 0.0)
        at_least = False
        for name, is_due in self.due.items():
            times = sum(map(is_due, left))
            known = self._parts[name]
            seconds += times * (sum(known) / len(known) if known else 0.0)
            at_least |= times > 0 and not known
        return TimeLeft(seconds, at_least)


def duration(seconds: float) -> str:
    """``75`` as ``1m15s``; two units at most, the way a person says it."""
    total = round(seconds)
    days, hours, minutes = total // 86400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{total % 60:02}s"
    return f"{total}s"
