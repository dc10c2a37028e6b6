"""A worker process that exchanges lines of JSON on a socket. It is not trusted to behave well.

It may hang, close its socket, leave processes that keep the socket open, write invalid JSON, or not
end when it is killed. So every wait here has a time limit.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from signal import Signals
from typing import Any

from rltrain.environments.conversation import Lines
from rltrain.environments.process_tree import kill_descendants
from rltrain.environments.supervisor import TOO_MANY_PROCESSES, Settings

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 0.5
STDERR = 2
PIECE, MOST_PIECES = 1 << 16, 64
"""Bytes that are read at once, and how often before the time limits are looked at."""


class WorkerProcess:
    """``python -m module SOCKET SETTINGS *arguments`` below a supervisor in its own session.

    ``fault`` says what is wrong with the process. It is empty while nothing is. No message is
    received from a process with a fault. ``wrote_wrongly`` says that it wrote what it should not.

    Args:
        environment: all variables of the process, besides the search path of its modules
    """

    def __init__(
        self, module: str, settings: Settings, environment: Mapping[str, str], *arguments: str
    ) -> None:
        self.fault = ""
        self.wrote_wrongly = False
        self._settings = settings
        self._is_killed = False
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._lines, self._unsent = Lines(), bytearray()
        # A new interpreter is started. A fork would copy locks that threads of Ray and torch hold,
        # and the spawn method of multiprocessing would import the main module of the parent.
        command = [sys.executable, "-m", module, str(theirs.fileno()), settings.to_json()]
        modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [*command, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,  # input of the terminal belongs to the run
            stdout=STDERR,  # until the worker has its log
            env={**environment, "PYTHONPATH": modules},
            start_new_session=True,  # signals of the terminal are for the run
        )
        theirs.close()

    @property
    def is_at_fault(self) -> bool:
        return bool(self.fault)

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def send(self, line: str) -> None:
        self._unsent += line.encode() + b"\n"
        self._write()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        if self.is_at_fault:
            return []
        self._write()
        ended = self._has_ended()  # before reading, so that its last messages are read
        messages: list[dict[str, Any]] = []
        for _ in range(MOST_PIECES):
            messages += self._lines.feed(self._read())
            if self._lines.fault:
                self.refuse(self._lines.fault)
            if self.fault or not self._has_unread():
                break
        if self.fault or ended:
            self._end()
        return messages

    def refuse(self, what: str) -> None:
        """Receive no more, for what it wrote."""
        self.fault, self.wrote_wrongly = f"its process {what}", True

    def kill(self) -> None:
        """Kill the process and all processes that it started.

        What does not end within `KILL_TIMEOUT_S` is left behind, with an error in the log."""
        if self._is_killed:
            return
        self._is_killed = True
        # The supervisor has not been reaped: its id could otherwise be another process's by now.
        left = kill_descendants(self.process.pid, KILL_TIMEOUT_S)
        try:
            self.process.wait(EXIT_TIMEOUT_S)  # it writes the last output of its worker
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
        try:
            self.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            left.append(self.process.pid)
        self.socket.close()
        if left:
            logger.error(
                "processes %s of a reward function did not end within %.0f s of SIGKILL; they are "
                "left behind",
                ", ".join(map(str, left)),
                KILL_TIMEOUT_S,
            )

    def _end(self) -> None:
        deadline = time.monotonic() + EXIT_TIMEOUT_S  # its socket closes before it has ended
        while not (ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        if ended:
            self.fault = f"its process {self._how_it_ended(self.process.returncode)}"

    def _how_it_ended(self, code: int) -> str:
        if code == TOO_MANY_PROCESSES:
            return f"had more than data.reward.limits.processes={self._settings.processes}"
        number = -code if code < 0 else code - 128
        if number in {number.value for number in Signals}:
            return f"was killed by {Signals(number).name}"
        return f"ended with exit code {code}"

    def _has_ended(self) -> bool:
        """Whether the process has ended. It stays a zombie, so that its id is its own."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, options) is not None

    def _read(self) -> bytes:
        """The bytes that have arrived; empty if there are none."""
        try:
            piece = self.socket.recv(PIECE)
        except BlockingIOError:
            return b""
        except OSError as error:
            self.fault = f"its process closed its connection: {error}"
            return b""
        if not piece:
            self.fault = "its process closed its connection"
        return piece

    def _write(self) -> None:
        """Send as much as the socket accepts."""
        try:
            while self._unsent and not self.fault:
                del self._unsent[: self.socket.send(self._unsent[:PIECE])]
        except BlockingIOError:
            return
        except OSError:  # the process closed its end; the next read reports that
            self._unsent.clear()

    def _has_unread(self) -> bool:
        return _ready([(self.socket, select.POLLIN)], 0.0)


def wait(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Sleep until a process sends a message or accepts more input, at most ``seconds``."""
    watched = [
        (p.socket, select.POLLIN | (select.POLLOUT if p.is_sending else 0))
        for p in processes
        if not p.is_at_fault
    ]
    _ready(watched, seconds)


def _ready(watched: Sequence[tuple[socket.socket, int]], seconds: float) -> bool:
    poll = select.poll()  # unlike select.select, for any number of open files
    for connection, events in watched:
        poll.register(connection, events)
    return bool(poll.poll(1000 * seconds))
