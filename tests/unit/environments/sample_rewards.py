"""Reward functions that succeed, fail and hang, for the worker processes of the tests."""

import os
import signal
import subprocess
import sys
import threading
import time

NOT_CALLABLE = 1

if os.environ.get("SAMPLE_REWARDS") == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif os.environ.get("SAMPLE_REWARDS") == "exit":
    threading.Thread(target=time.sleep, args=(600,)).start()
    sys.exit(6)


class MuteError(BaseException):
    def __str__(self) -> str:
        raise ValueError("no words")


def length(response: str, answer: object, **columns: object) -> float:
    return float(len(response))


def see_columns(response: str, answer: object, **columns: object) -> float:
    texts = response, columns["response_raw"], columns["response_clean"]
    seen = columns["prompt"] == "1+1=" and columns["level"] == 3 and answer == {"a": 1}
    return float(seen) + 2 * (texts == ("<x>", "<x>", "x")) + 4 * (texts == ("x", "<x>", "x"))


def graded(response: str, answer: object, **columns: object) -> object:
    """What the response says, read as Python."""
    import numpy as np
    import torch

    return eval(response, {"np": np, "torch": torch})


def declared(response: str, answer: object, **columns: object) -> float:
    return float(response)


declared.success_at = 0.5  # type: ignore[attr-defined]


def take_out(response: str, answer: list[int], **columns: list[int]) -> float:
    """Changes what it was given."""
    return float(sum((answer.pop(), columns["tests"].pop())))


def ranks(responses: list[str], answer: object, **columns: object) -> list[float]:
    """Of each response, how many are shorter."""
    return [float(sum(len(other) < len(one) for other in responses)) for one in responses]


def group_acts(responses: list[str], answer: object, **columns: object) -> object:
    """Does what the first response says, read as Python."""
    return eval(responses[0], dict(globals(), n=len(responses), columns=columns, texts=responses))


def wrong_group(response: str, answer: object) -> list[float]:
    return []


for _function in (ranks, group_acts, wrong_group):
    _function.takes_group = True  # type: ignore[attr-defined]
ranks.success_at = 1.0  # type: ignore[attr-defined]


def wrong_mark(response: str, answer: object, **columns: object) -> float:
    return 0.0


wrong_mark.takes_group = "yes"  # type: ignore[attr-defined]


def act_out(response: str, answer: object, **columns: object) -> float:
    """Does what the response says."""
    what, _, number = response.partition(" ")
    connection = int(sys.argv[1]) if sys.argv[1:2] and sys.argv[1].isdigit() else -1
    if what == "hello":
        sys.stdout.write("sees hello\n")
        time.sleep(60)
    elif what == "sleep":
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
    elif what == "fork":  # the grandchild has the connection, too
        if pid := os.fork():
            with open(number, "w") as file:
                file.write(str(pid))
            os._exit(4)
        time.sleep(60)
    elif what == "exit":
        os._exit(int(number))
    elif what == "close":
        os.closerange(3, connection + 1)
        time.sleep(60)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
        sys.exit(5)
    elif what == "write":
        os.write(connection, number.encode())
    elif what == "flood":
        os.write(connection, b" " * 1_000_000)
        os.write(connection, b" " * 1_000_000)
    elif what == "half":
        os.write(connection, b'{"sample"')
        time.sleep(60)
    elif what == "print":
        sys.stdout.write("x" * 100_000 + sys.stdin.read())
    elif what == "raise":
        raise {
            "lost": KeyError("lost"),
            "interrupt": KeyboardInterrupt(),
            "memory": MemoryError(),
            "mute": MuteError(),
            "long": RuntimeError("x" * 5_000_000),
        }[number]
    elif what == "recurse":
        return act_out(response, answer, **columns)
    elif what == "nan":
        return float("nan")
    elif what == "text":
        return "a lot"  # type: ignore[return-value]
    return float(number)


def no_columns(response: str, answer: object) -> float:
    return 0.0


async def too_late(response: str, answer: object, **columns: object) -> float:
    return 0.0
