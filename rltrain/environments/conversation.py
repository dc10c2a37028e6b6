"""What a reward worker says, checked: its lines, and its messages about samples.

Everything here is pure. A worker runs the user's code, which may write anything to the connection,
so each message has to be the one that is due: one ``began`` for each list of groups, then the
results of each group in order, and before them a ``call`` for each call of a component. The pool's
clock decides about time. The clock of a message only says when, since the last event, something
happened; it is never later than now.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rltrain.config.redact import escape_control
from rltrain.environments.reward_sample import RewardResult
from rltrain.environments.rewards import LARGEST, LONGEST_DETAIL, judgement

LONGEST_LINE = 1 << 20
"""Maximum bytes of one message. Messages are short."""
MOST_MESSAGES = 2500
"""Maximum messages in one piece of what was received. More of the shortest do not fit in one."""


class Lines:
    """Takes apart bytes into messages, which are JSON objects, one on each line.

    ``fault`` says what the process did wrong. It is empty while nothing is.
    """

    def __init__(self) -> None:
        self.fault = ""
        self._rest = b""

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete, up to the first that is none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        messages: list[dict[str, Any]] = []
        for line in lines[:MOST_MESSAGES]:
            if (message := _message(line)) is None:
                self.fault = f"wrote {line[:80]!r}, which is no message"
                return messages
            messages.append(message)
        if len(lines) > MOST_MESSAGES:
            self.fault = f"wrote more than {MOST_MESSAGES} messages at once"
        elif len(self._rest) > LONGEST_LINE:
            self.fault = f"wrote a message of more than {LONGEST_LINE} bytes"
        return messages


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


class Conversation:
    """The state of a worker by what it has said and was given. Times are ``time.monotonic()``.

    ``assigned`` are the groups without results, in order; most are of one sample. ``began`` is when
    the first of them began; None if it has not, or if there is none. ``component`` is what it
    called last for that group; "" for none.

    Args:
        components: the names of the reward's; none for a single function
    """

    def __init__(self, now: float, components: Sequence[str] = ()) -> None:
        self._components = components
        self.is_ready = False
        self.success_at: float | None = None
        self.unusable = ""
        self.takes_groups = False
        self.assigned: list[tuple[int, ...]] = []
        self.since = now
        """The start of the process, or its last assignment."""
        self._begin(None)

    @property
    def component(self) -> str:
        return self._components[self._component] if self._component >= 0 else ""

    def assign(self, groups: list[tuple[int, ...]], now: float) -> None:
        self.assigned, self.since = groups, now
        self._begin(None)

    def _begin(self, at: float | None) -> None:
        """The next group, at this time."""
        self.began = self._called = at
        self._component, self._calls = -1, 0  # the last that was called, and how often
        self._results: dict[int, RewardResult] = {}  # of this group, until it has all

    def deadline(self, timeout_s: float) -> float:
        """When the current call is out of time; infinity if no group has begun."""
        return math.inf if self._called is None else self._called + timeout_s

    def take(
        self, message: dict[str, Any], now: float, success_at: float | None
    ) -> dict[int, RewardResult]:
        """The results of a group with its last message, by position; empty for another message.

        Args:
            success_at: the reward from which on a response is correct
        Raises:
            ValueError: another message was due. The text begins with what the process did.
        """
        try:
            if not self.is_ready:
                self._take_start(message)
            elif "began" in message:
                _expect(bool(self.assigned) and self.began is None)
                self._begin(self._time(message["began"], now))
            elif "call" in message:
                self._take_call(message, now)
            else:
                return self._take_result(message, now, success_at)
        except (KeyError, TypeError, ValueError) as error:
            shown = escape_control(str(message)[:200])
            raise ValueError(f"wrote {shown!r}, which is no result") from error
        return {}

    def _take_start(self, message: dict[str, Any]) -> None:
        _expect(not self.unusable)
        if "unusable" in message:
            _expect(isinstance(message["unusable"], str) and message["unusable"] != "")
            self.unusable = _detail(message["unusable"])
            return
        success_at = message["ready"]
        if success_at is not None:
            _expect(type(success_at) in (int, float) and abs(success_at) <= LARGEST)
        takes_groups = message.get("takes_groups", False)
        _expect(isinstance(takes_groups, bool))
        self.is_ready, self.success_at, self.takes_groups = True, success_at, takes_groups

    def _take_call(self, message: dict[str, Any], now: float) -> None:
        """A component is called once for a group, or once for each of its samples."""
        _expect(self.began is not None and not self._results)
        is_next = message["call"] in self._components[self._component + 1 : self._component + 2]
        _expect(is_next or (message["call"] == self.component != ""))
        _expect(is_next or self._calls < len(self.assigned[0]))
        self._called = self._time(message["clock"], now)
        self._component, self._calls = (
            (self._component + 1, 1) if is_next else (self._component, self._calls + 1)
        )

    def _take_result(
        self, message: dict[str, Any], now: float, success_at: float | None
    ) -> dict[int, RewardResult]:
        number = message["sample"]
        _expect(bool(self.assigned) and self.began is not None)
        assert self.began is not None
        group = self.assigned[0]
        # True equals 1, so the type is compared, too.
        _expect(type(number) is int and group[len(self._results)] == number)
        at = self._time(message["clock"], now)
        self._results[number] = _result(message, success_at)
        if len(self._results) < len(group):
            return {}
        share = (at - self.began) / len(group)
        results = {n: replace(one, seconds=share) for n, one in self._results.items()}
        self.assigned.pop(0)
        self._begin(at if self.assigned else None)
        return results

    def _time(self, clock: object, now: float) -> float:
        """The time of an event, between the event before it and now."""
        _expect(type(clock) is float and math.isfinite(clock))
        assert isinstance(clock, float)
        return min(max(clock, self.since if self._called is None else self._called), now)


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError("another message was due")


def _result(message: dict[str, Any], success_at: float | None) -> RewardResult:
    if "error" in message:
        _expect(isinstance(message["error"], str))
        return RewardResult(None, "error", _detail(message["error"]), 0.0)
    said = {name: message[name] for name in ("reward", "correct")}
    value, correct, parts = judgement(message["parts"] | said)
    if correct is None and success_at is not None:
        correct = value >= success_at
    return RewardResult(value, "ok", "", 0.0, correct, parts)


def _detail(text: str) -> str:
    """Without what a terminal would obey or a file could not hold, such as half a surrogate."""
    return escape_control(text[:LONGEST_DETAIL])
