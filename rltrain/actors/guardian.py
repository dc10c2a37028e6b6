"""A process that ends what a run's own Ray left on this machine, however the run has ended.

    python -m rltrain.actors.guardian RAYLET

It reads its standard input, whose other end the run holds: that closes when the run's process ends,
also by SIGKILL. Ray's own processes end with the run's; an actor that is stopped, what an engine
started, and Ray's agents may not.
"""

import signal
import subprocess
import sys
from contextlib import suppress

import psutil

from rltrain.actors.run_processes import RAYLET, end_processes_with

END_S = 20.0


class Guardian:
    """The guardian of this process's Ray.

    Args:
        raylet: the process ID of its raylet
    """

    def __init__(self, raylet: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(raylet)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run
        )

    def end(self) -> None:
        """Once Ray was shut down: returns when nothing is left of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main(raylet: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(psutil.NoSuchProcess):
        agents = psutil.Process(raylet).children()  # later their environment cannot be read
        sys.stdin.buffer.read()
        for agent in agents:
            with suppress(psutil.NoSuchProcess):
                agent.kill()
    end_processes_with(lambda environment: environment.get(RAYLET) == str(raylet))


if __name__ == "__main__":
    main(int(sys.argv[1]))
