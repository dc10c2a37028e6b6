"""``rltrain.main``, which says what it does next and waits there until it may go on.

    python -m tests.chaos.driver DESCRIPTOR argument ...

The other end of the socket gets the name of each phase as it begins, on a line of its own, and
answers with a byte. Nothing else of the run is changed.
"""

import socket
import sys
from collections.abc import Mapping

from rltrain.main import main
from rltrain.tracking.progress import ProgressLines
from rltrain.tracking.tracker import Tracker

METRICS = "metrics"
"""What is called a phase here: writing the row of a step."""


def announce(connection: socket.socket) -> None:
    """Have the progress of the run and its tracker say what begins."""

    def say(name: str) -> None:
        connection.sendall(f"{name}\n".encode())
        connection.recv(1)

    phase, log = ProgressLines.phase, Tracker.log

    def announced_phase(self: ProgressLines, name: str | None) -> None:
        phase(self, name)
        if name is not None:
            say(name)

    def announced_log(self: Tracker, step: int, metrics: Mapping[str, float]) -> None:
        say(METRICS)
        log(self, step, metrics)

    ProgressLines.phase = announced_phase  # type: ignore[method-assign]
    Tracker.log = announced_log  # type: ignore[method-assign]


if __name__ == "__main__":
    announce(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(main(sys.argv[2:]))
