"""The process that runs a reward function; started by ``pool`` as ``python -m``, never imported.

It serves one connection. At start it answers ``("ready", None)`` or ``("unusable", why)``; then for
each list of samples it answers ``("began", clock)`` and one ``(status, value, detail, clock)`` a
sample. Clocks are ``time.monotonic()``, which all processes of a machine share, so that the time a
message waits to be read counts against nobody's limit.
"""

import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rltrain.environments.rewards import Reward, load_reward


def serve(connection: Connection, name: str) -> None:
    try:
        reward = load_reward(name)
    except ValueError as error:
        connection.send(("unusable", str(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            received = connection.recv_bytes()
        except EOFError:  # the pool closed its end
            return
        connection.send(("began", time.monotonic()))
        samples = pickle.loads(received)  # from our own parent, through a pipe nobody else has
        for response, answer, columns in samples:
            status, value, detail = score(reward, response, answer, columns)
            connection.send((status, value, detail, time.monotonic()))


def score(
    reward: Reward, response: str, answer: object, columns: dict[str, Any]
) -> tuple[str, float | None, str]:
    """``("ok", reward, "")`` or ``("error", None, what happened and where)``."""
    try:
        value = float(reward(response, answer, **columns))
    except Exception as error:  # it is the user's function: whatever it raises is reported
        at = traceback.extract_tb(error.__traceback__)[-1]
        last_line = traceback.format_exception_only(error)[-1].strip()
        return "error", None, f"{last_line} ({at.filename}:{at.lineno}, in {at.name})"
    if not math.isfinite(value):
        return "error", None, f"ValueError: the reward is {value}, expected a finite number"
    return "ok", value, ""


def _die_with_parent(parent: int) -> None:
    """A hung reward must not outlive a pool that was killed and could not clean up."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    descriptor, parent, reward_name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    threading.Thread(target=_die_with_parent, args=(parent,), daemon=True).start()
    serve(Connection(descriptor), reward_name)
