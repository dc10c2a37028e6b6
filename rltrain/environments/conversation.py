"""What a reward worker says, checked: its lines, and its messages about samples.

Everything here is pure. A worker runs the user's code, which may write anything to the connection,
so each message has to be the one that is due: one ``began`` for each list of samples, then the
result of each sample in order, and before it a ``call`` for each component of the reward. The
pool's clock decides about time. The clock of a message only says when, since the last event,
something happened; it is never later than now.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from rltrain.config.redact import escape_control
from rltrain.environments.reward_sample import RewardResult
from rltrain.environments.rewards import LARGEST, LONGEST_DETAIL, judgement

LONGEST_LINE = 1 << 20
"""Maximum bytes of one message. Messages are short."""
MOST_MESSAGES = 1000
"""Maximum messages in one piece of what was received. A worker has one for each call, and two for
each sample at most."""


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

    ``assigned`` are the samples without a result, in order. ``began`` is when the first of them
    began; None if it has not, or if there is none. ``component`` is what it called last for that
    sample; "" for none.

    Args:
        components: the names of the reward's; none for a single function
    """

    def __init__(self, now: float, components: Sequence[str] = ()) -> None:
        self._components = components
        self.is_ready = False
        self.success_at: float | None = None
        self.unusable = ""
        self.assigned: list[int] = []
        self.since = now
        """The start of the process, or its last assignment."""
        self._begin(None)

    @property
    def component(self) -> str:
        return self._components[self._calls - 1] if self._calls else ""

    def assign(self, positions: list[int], now: float) -> None:
        self.assigned, self.since = positions, now
        self._begin(None)

    def _begin(self, at: float | None) -> None:
        """The next sample, at this time."""
        self.began = self._called = at
        self._calls = 0

    def deadline(self, timeout_s: float) -> float:
        """When the current call is out of time; infinity if no sample has begun."""
        return math.inf if self._called is None else self._called + timeout_s

    def take(
        self, message: dict[str, Any], now: float, success_at: float | None
    ) -> dict[int, RewardResult]:
        """The result in a message, by the position of its sample; empty for another message.

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
        self.is_ready, self.success_at = True, success_at

    def _take_call(self, message: dict[str, Any], now: float) -> None:
        due = self._components[self._calls : self._calls + 1]
        _expect(self.began is not None and list(due) == [message["call"]])
        self._called = self._time(message["clock"], now)
        self._calls += 1

    def _take_result(
        self, message: dict[str, Any], now: float, success_at: float | None
    ) -> dict[int, RewardResult]:
        number = message["sample"]
        # True equals 1, so the type is compared, too.
        _expect(type(number) is int and self.assigned[:1] == [number] and self.began is not None)
        assert self.began is not None
        at = self._time(message["clock"], now)
        result = _result(message, at - self.began, success_at)
        self.assigned.pop(0)
        self._begin(at if self.assigned else None)
        return {number: result}

    def _time(self, clock: object, now: float) -> float:
        """The time of an event, between the event before it and now."""
        _expect(type(clock) is float and math.isfinite(clock))
        assert isinstance(clock, float)
        return min(max(clock, self.since if self._called is None else self._called), now)


def _expect(holds: bool) -> None:
    if not holds:
        raise ValueError("another message was due")


def _result(message: dict[str, Any], seconds: float, success_at: float | None) -> RewardResult:
    if "error" in message:
        _expect(isinstance(message["error"], str))
        return RewardResult(None, "error", _detail(message["error"]), seconds)
    said = {name: message[name] for name in ("reward", "correct")}
    value, correct, parts = judgement(message["parts"] | said)
    if correct is None and success_at is not None:
        correct = value >= success_at
    return RewardResult(value, "ok", "", seconds, correct, parts)


def _detail(text: str) -> str:
    """Without what a terminal would obey or a file could not hold, such as half a surrogate."""
    return escape_control(text[:LONGEST_DETAIL])
