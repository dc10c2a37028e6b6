"""Ctrl-C and SIGTERM: the first closes everything in order, the second ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

AGAIN = "interrupted again while it was being closed"
LATE = "interrupted, and not closed within trainer.grace_s"

GUARDIAN = "rltrain.actors.guardian"

_last_acts: list[Callable[[str], None]] = []
_received: list[signal.Signals] = []
"""Kept here, because Ray raises a KeyboardInterrupt of its own in place of the handler's."""
_grace_s: list[float] = []
"""How long the closing may take; the last one counts."""
_held: list[bool] = []
"""For every `signals_held` that is open, whether a signal came within."""


def exit_status() -> int:
    """130 or 143, as shells have it: of the first signal."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def signal_name() -> str:
    """What interrupted this command, in words."""
    is_sigterm = bool(_received) and _received[0] == signal.SIGTERM
    return "SIGTERM" if is_sigterm else "Ctrl-C (SIGINT)"


@contextmanager
def closing_on_signals() -> Iterator[None]:
    """Within, the first signal raises KeyboardInterrupt where the program is, and another one ends
    this process and all that it started. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    timers: list[threading.Timer] = []

    def handle(number: int, _: Any) -> None:
        _received.append(signal.Signals(number))
        if len(_received) > 1:
            end_at_once(128 + number)
        if _grace_s:
            timers.append(threading.Timer(_grace_s[-1], end_at_once, [128 + number, LATE]))
            timers[-1].daemon = True
            timers[-1].start()
        if _held:
            _held[-1] = True
            _say("interrupted: the step is finished first; Ctrl-C again ends it at once")
            return
        if psutil.Process().children():
            _say("interrupted: closing what was started; Ctrl-C again ends it at once")
        raise KeyboardInterrupt(signal_name())

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def grace(seconds: float) -> Iterator[None]:
    """Within, everything ends so long after the first signal, if it has not until then."""
    _grace_s.append(seconds)
    try:
        yield
    finally:
        _grace_s.pop()


@contextmanager
def signals_held() -> Iterator[Callable[[], bool]]:
    """Within, the first signal waits for the end of the block, and raises KeyboardInterrupt there.

    Yields:
        whether one waits: what is not needed can be left out
    """
    _held.append(False)
    try:
        yield lambda: _held[-1]
    finally:
        came = _held.pop()
    if came:
        raise KeyboardInterrupt(signal_name())


@contextmanager
def last_act(act: Callable[[str], None]) -> Iterator[None]:
    """Within, `end_at_once` calls ``act`` first, with its reason. It must be quick."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def end_at_once(status: int, why: str = AGAIN) -> None:
    """Kill every process below this one, then end this one, without closing anything. The guardian
    stays, and removes what is left."""
    for act in _last_acts:
        try:
            act(why)
        except Exception as error:
            _say(f"{type(error).__name__}: {error}")
    _say(f"{why}: every process of this command was ended")
    this = psutil.Process()
    for _ in range(3):  # what they started in the meantime, too
        for child in this.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if GUARDIAN not in child.cmdline():
                    child.kill()
    os._exit(status)


def _say(text: str) -> None:
    with suppress(RuntimeError, OSError):  # the signal came within a write to the same stream
        sys.stderr.write(f"\nrltrain: {text}\n")
        sys.stderr.flush()
