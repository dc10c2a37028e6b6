"""A worker process that exchanges lines of JSON on a socket. It is not trusted to behave well.

It may hang, close its socket, leave a child process that keeps the socket open, write invalid JSON,
or not end when it is killed. So every wait here has a time limit.
"""

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 0.5
LONGEST_LINE = 1 << 20
"""Maximum bytes of one message of the process. Its messages are short."""
STDERR = 2
PIECE, MOST_PIECES = 1 << 16, 64


class WorkerProcess:
    """``python -m module SOCKET PARENT *arguments`` in its own session.

    ``fault`` says what is wrong with the process. It is empty while nothing is. No message is
    received from a process with a fault.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self.fault = ""
        self._is_killed = False
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._received, self._unsent = bytearray(), bytearray()
        # A new interpreter is started. A fork would copy locks that threads of Ray and torch hold,
        # and the spawn method of multiprocessing would import the main module of the parent.
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            [*command, *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,  # input of the terminal belongs to the run
            stdout=STDERR,  # its output is not output of the run
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            start_new_session=True,  # so that its child processes are killed with it
        )
        theirs.close()

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def send(self, line: str) -> None:
        self._unsent += line.encode() + b"\n"
        self._write()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        if self.fault:
            return []
        self._write()
        ended = self._has_ended()  # before reading, so that its last messages are read
        messages: list[dict[str, Any]] = []
        for _ in range(MOST_PIECES):
            self._received += self._read()
            *lines, rest = self._received.split(b"\n")
            self._received = rest
            messages += [message for line in lines if (message := self._parsed(line)) is not None]
            if len(self._received) > LONGEST_LINE:
                self.fault = f"its process wrote a message of more than {LONGEST_LINE} bytes"
            if self.fault or not self.has_message():
                break
        if self.fault or ended:
            self._end()
        return messages

    def has_message(self) -> bool:
        return not self.fault and _ready([(self.socket, select.POLLIN)], 0.0)

    def kill(self) -> None:
        """Kill the process and all its child processes.

        A process that does not end within `KILL_TIMEOUT_S` is left behind, with an error in the
        log."""
        if self._is_killed:
            return
        self._is_killed = True
        # The process has not been reaped: its group id could otherwise be another group's by now.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error(
                "process %d of a reward function did not end within %.0f s of SIGKILL; it is left "
                "behind",
                self.process.pid,
                KILL_TIMEOUT_S,
            )
        self.socket.close()

    def _end(self) -> None:
        deadline = time.monotonic() + EXIT_TIMEOUT_S  # its socket closes before it has ended
        while not (ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        if ended:
            self.fault = f"its process ended with exit code {self.process.returncode}"

    def _has_ended(self) -> bool:
        """Whether the process has ended. It stays a zombie, so that its group can still be
        killed."""
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

    def _parsed(self, line: bytearray) -> dict[str, Any] | None:
        if self.fault:
            return None
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.fault = f"its process wrote {bytes(line[:80])!r}, which is no message"
            return None
        return message


def wait(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Sleep until a process sends a message or accepts more input, at most ``seconds``."""
    watched = [
        (p.socket, select.POLLIN | (select.POLLOUT if p.is_sending else 0))
        for p in processes
        if not p.fault
    ]
    _ready(watched, seconds)


def _ready(watched: Sequence[tuple[socket.socket, int]], seconds: float) -> bool:
    poll = select.poll()  # unlike select.select, for any number of open files
    for connection, events in watched:
        poll.register(connection, events)
    return bool(poll.poll(1000 * seconds))
