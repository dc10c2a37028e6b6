"""Reward functions that go well, badly and nowhere, for the worker processes of the tests."""

import os
import signal
import subprocess
import sys
import time

NOT_CALLABLE = 1


def length(response: str, answer: object, **columns: object) -> float:
    return float(len(response))


def see_columns(response: str, answer: object, **columns: object) -> float:
    return float(columns["prompt"] == "1+1=" and columns["level"] == 3 and answer == {"a": 1})


def act_out(response: str, answer: object, **columns: object) -> float:
    """Does what the response says."""
    what, _, number = response.partition(" ")
    if what == "sleep":
        time.sleep(float(number))
    elif what == "hang":  # SIGTERM would not end this one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass
    elif what == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        with open(number, "w") as file:
            file.write(str(child.pid))
        time.sleep(60)
    elif what == "exit":
        os._exit(int(number))
    elif what == "raise":
        raise KeyError(number)
    elif what == "nan":
        return float("nan")
    elif what == "text":
        return "a lot"  # type: ignore[return-value]
    return float(number)


def no_columns(response: str, answer: object) -> float:
    return 0.0


async def too_late(response: str, answer: object, **columns: object) -> float:
    return 0.0
