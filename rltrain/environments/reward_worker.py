"""The process that runs a reward function; started by ``pool`` as ``python -m``, never imported.

It reads and writes lines of JSON on one socket. At start it writes ``{"ready": success_at,
"takes_groups": bool}`` or ``{"unusable": why}``. Then it reads lists of groups, most of one sample;
for each list it writes ``{"began": clock}`` and for each sample ``{"sample": number, "clock":
clock}`` with ``reward``, ``correct`` and ``parts``, or with ``error``. Before each call of a
component it writes ``{"call": name, "clock": clock}``. Clocks are ``time.monotonic()``, which all
processes of a machine share. So the time that a message waits to be read does not count against a
limit. The process forks at once: the first one becomes the ``supervisor`` of the second, which runs
the function."""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from rltrain.config.reward import RewardConfig
from rltrain.environments.loaded_reward import described, load, score
from rltrain.environments.supervisor import Settings, supervise


def serve(connection: socket.socket, config: RewardConfig) -> None:
    def say(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    def begin(component: str) -> None:
        say({"call": component, "clock": time.monotonic()})

    try:
        reward = load(config)
    except BaseException as error:  # importing runs the user's code, which may do anything
        say({"unusable": str(error) if isinstance(error, ValueError) else described(error)})
        return
    say({"ready": reward.success_at, "takes_groups": reward.takes_groups})
    for line in connection.makefile("rb"):
        say({"began": time.monotonic()})
        for group in json.loads(line):
            outcomes = score(reward, group, begin)
            for number, outcome in zip(group["numbers"], outcomes, strict=True):
                say({"sample": number, "clock": time.monotonic(), **outcome})


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # processes that the reward starts must not get it
    supervise(Settings.from_json(sys.argv[2]), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be killed
    with suppress(OSError):  # the pool is gone, or the reward function closed the socket
        serve(socket.socket(fileno=descriptor), RewardConfig.model_validate_json(sys.argv[3]))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)  # a thread that the reward function left would keep the interpreter alive
