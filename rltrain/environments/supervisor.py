"""The process between the pool and a reward worker.

It adopts what the worker leaves behind, writes the worker's output to a log of limited size, and
kills all processes below it when the worker ends, starts too many, or the pool's process is gone.
It runs none of the user's code: a worker may hold the interpreter's lock for ever, or be stopped.
"""

import json
import os
import resource
import select
import signal
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from rltrain.environments.capped_log import CappedLog
from rltrain.environments.process_tree import (
    adopt_orphans,
    descendants,
    kill_descendants,
    request_signal_at_end_of_parent,
)

GIB, MIB = 2**30, 2**20
KILL_TIMEOUT_S = 5.0
COUNT_EVERY_S = 1.0
"""How often the processes of the worker are counted."""
TOO_MANY_PROCESSES = 113
"""Exit status of a supervisor whose worker had more processes than it may have."""
PIPE_BYTES = 1 << 16


class Settings(NamedTuple):
    """What a supervisor is told. None for a limit: there is none.

    ``memory_gib`` limits the private writable memory of each process (``RLIMIT_DATA``). A limit of
    the address space (``RLIMIT_AS``) would count what CUDA reserves and never uses.
    """

    parent: int
    log: str
    memory_gib: float | None
    file_gib: float | None
    core_gib: float | None
    processes: int | None
    log_mib: float | None

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(self._asdict())


def supervise(settings: Settings, connection: int) -> None:
    """Fork. This returns in the new process, which is the worker. The process that called it
    becomes the worker's supervisor and ends with the worker.

    Args:
        connection: the worker's file; the supervisor closes it, so that its end is the worker's
    """
    signal.signal(signal.SIGTERM, lambda *_: _end_without_parent(settings.parent))
    request_signal_at_end_of_parent(signal.SIGTERM)
    _end_without_parent(settings.parent)  # it may have ended before the request
    adopt_orphans()
    output, theirs = os.pipe()
    supervisor = os.getpid()
    worker = os.fork()  # there is one thread, so no lock is copied
    if worker == 0:
        _become_worker(settings, supervisor, theirs)
        os.close(output)
        return
    os.close(theirs)
    os.close(connection)
    status = 1
    try:
        status = _Supervisor(settings, worker, output).run()
    finally:
        kill_descendants(supervisor, KILL_TIMEOUT_S)
        os._exit(status)


def _end_without_parent(parent: int) -> None:
    # The signal also comes when only the thread that started this process ends.
    if os.getppid() != parent:
        kill_descendants(os.getpid(), KILL_TIMEOUT_S)
        os._exit(1)


def _become_worker(settings: Settings, supervisor: int, output: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    request_signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    for limited, gib in (
        (resource.RLIMIT_DATA, settings.memory_gib),
        (resource.RLIMIT_FSIZE, settings.file_gib),
        (resource.RLIMIT_CORE, settings.core_gib),
    ):
        if gib is not None:
            _limit(limited, int(gib * GIB))
    # When memory is short, the kernel shall end a worker, and not an engine or the trainer.
    with suppress(OSError):  # a container may not have the file, or refuse
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(limited: int, value: int) -> None:
    _, hard = resource.getrlimit(limited)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limited, (value, value))


def _signalled_by(number: signal.Signals) -> int:
    """A file that can be read after this signal."""
    readable, writable = os.pipe()
    for end in (readable, writable):
        os.set_blocking(end, False)
    signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writable)
    return readable


class _Supervisor:
    """Waits for the worker to end, and meanwhile for its output."""

    def __init__(self, settings: Settings, worker: int, output: int) -> None:
        self._settings = settings
        self._worker = worker
        self._output = output
        os.set_blocking(output, False)
        limit = settings.log_mib
        self._log: CappedLog | None = None
        with suppress(OSError):  # a full disk costs the output, not the reward
            self._log = CappedLog(Path(settings.log), None if limit is None else int(limit * MIB))
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._write(f"=== reward worker, process {worker}, starts, {now} ===\n".encode())

    def run(self) -> int:
        """The exit status of the worker, or 128 and the number of the signal that ended it."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(ended := _signalled_by(signal.SIGCHLD), select.POLLIN)
        most = self._settings.processes
        count_at = time.monotonic() + COUNT_EVERY_S
        while True:
            events = poll.poll(1000 * COUNT_EVERY_S)
            if not self._relay() and (self._output, select.POLLHUP) in events:
                poll.unregister(self._output)  # nobody has it open any more
            if (ended, select.POLLIN) in events:
                os.read(ended, PIPE_BYTES)
            if (status := self._reap()) is not None:
                self._end()
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if most is not None and time.monotonic() > count_at:
                if (found := len(descendants(os.getpid()))) > most:
                    self._write(f"\n=== killed: it has {found} processes ===\n".encode())
                    self._end()
                    return TOO_MANY_PROCESSES
                count_at = time.monotonic() + COUNT_EVERY_S

    def _end(self) -> None:
        """Kill what is left, and write what it had written."""
        kill_descendants(os.getpid(), KILL_TIMEOUT_S)
        while self._relay():
            pass

    def _relay(self) -> bool:
        """Whether there was output. It is taken even if it cannot be written, so that no worker
        waits."""
        try:
            data = os.read(self._output, PIPE_BYTES)
        except BlockingIOError:
            return False
        self._write(data)
        return bool(data)

    def _write(self, data: bytes) -> None:
        if self._log is not None:
            with suppress(OSError):  # as above
                self._log.write(data)

    def _reap(self) -> Any:
        """The status of the worker, if it has ended. Adopted processes that have ended go, too."""
        status = None
        with suppress(ChildProcessError):  # none is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._worker:
                    status = ended[1]
        return status
