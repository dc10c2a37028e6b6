"""The process that runs a reward function; started by ``pool`` as ``python -m``, never imported.

It reads and writes lines of JSON on one socket. At start it writes ``{"ready": success_at}`` or
``{"unusable": why}``. Then it reads lists of samples; for each list it writes ``{"began": clock}``
and for each sample ``{"sample": number, "clock": clock}`` with ``reward``, ``correct`` and
``parts``, or with ``error``. Clocks are ``time.monotonic()``, which all processes of a machine
share. So the time that a message waits to be read does not count against a limit. The process
forks at once: the first one becomes the ``supervisor`` of the second, which runs the function."""

import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rltrain.environments.rewards import (
    LONGEST_DETAIL,
    Reward,
    declared_success,
    judgement,
    load_reward,
)
from rltrain.environments.supervisor import Settings, supervise


def serve(connection: socket.socket, name: str) -> None:
    def say(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    try:
        reward = load_reward(name)
        # Import it now, so that it does not count against the limit of the first sample.
        importlib.import_module(getattr(reward, "needs", "json"))
        success_at = declared_success(reward)
    except BaseException as error:  # importing runs the user's code, which may do anything
        say({"unusable": str(error) if isinstance(error, ValueError) else _described(error)})
        return
    say({"ready": success_at})
    for line in connection.makefile("rb"):
        say({"began": time.monotonic()})
        for sample in json.loads(line):
            outcome = score_sample(reward, sample["response"], sample["answer"], sample["columns"])
            say({"sample": sample["number"], "clock": time.monotonic(), **outcome})


def score_sample(
    reward: Reward, response: str, answer: object, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """``reward``, ``correct`` and ``parts``, or ``error`` with its place."""
    try:
        return judgement(reward(response, answer, **columns))._asdict()
    except BaseException as error:  # the user's function may raise anything, or exit
        return {"error": _described(error)[:LONGEST_DETAIL]}


def _described(error: BaseException) -> str:
    (at,) = traceback.extract_tb(error.__traceback__, limit=-1)
    last_line = traceback.format_exception_only(error)[-1].strip()
    return f"{last_line} ({at.filename}:{at.lineno}, in {at.name})"


if __name__ == "__main__":
    descriptor, reward_name = int(sys.argv[1]), sys.argv[3]
    os.set_inheritable(descriptor, False)  # processes that the reward starts must not get it
    supervise(Settings.from_json(sys.argv[2]), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be killed
    with suppress(OSError):  # the pool is gone, or the reward function closed the socket
        serve(socket.socket(fileno=descriptor), reward_name)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # a thread that the reward function left would keep the interpreter alive
