"""Several faults in one run, each in a step of its own, and what became of them.

A run that goes on by itself meets the next fault; one that has ended is started again with
``trainer.resume=auto``, as a person would. In the end its weights and its metrics are compared with
those of a run that nothing happened to.
"""

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rltrain.tracking.tracker import last_step
from tests.chaos.faults import DAMAGES, FILLER, START, Fault, damage, inject, repair
from tests.chaos.outcome import what_was_said

ROOT = Path(__file__).parents[2]
HANG_S = 900.0
"""Without any news for so long, a run hangs."""
LEAVE_S = 30.0
"""How long what a run started may take to end after it."""
LOG_END = 2000
"""Characters of a log that the error of a run shows: the log itself is removed with the run."""
MARK = "RLTRAIN_CHAOS"
"""Environment variable of all processes of a chain."""


@dataclass
class Row:
    """What became of one fault."""

    fault: str
    phase: str
    step: int
    said: str = ""
    ended: str = ""
    """Exit status, of a run that did not go on by itself."""
    seconds: float | None = None
    """From the fault until the step that it met was done."""
    steps_lost: int | None = None
    """Steps whose metrics were there already, and that were taken again."""
    left: list[str] = field(default_factory=list)
    """Processes, entries of TMPDIR and of /dev/shm, once all had ended."""
    bitwise: bool | None = None
    """Whether the weights and metrics of the whole run are those of an undisturbed one."""


class Hung(RuntimeError):
    """A run gave no news for `HANG_S`."""


@dataclass
class Chain:
    """
    Args:
        command: of ``rltrain.main``, without the folder
        folder: for the run, its output and its TMPDIR; short, since sockets are below it
        phase_s: seconds of each phase of the undisturbed run
    """

    faults: Sequence[Fault]
    command: Sequence[str]
    folder: Path
    phase_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._waiting = deque(self.faults)
        self.rows: list[Row] = []
        self.failure = ""
        self._open: Row | None = None
        self._began = 0.0
        self._logged = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def execute(self) -> list[Row]:
        """Run it to its end, however often it has to be started.

        Raises:
            Hung: nothing was heard of the run for `HANG_S`.
            RuntimeError: the run ended by itself, or before it met every fault.
        """
        (self.folder / "tmp").mkdir(mode=0o700)
        self.run.mkdir(exist_ok=True)
        before = set(os.listdir("/dev/shm"))
        for attempt in range(2 * len(self.faults) + 2):
            status = self._attempt(resume=attempt > 0)
            if status == 0:
                break
            if self._open is None:
                end = self.log.read_text(errors="replace")[-LOG_END:]
                raise RuntimeError(f"the run ended by itself, with status {status}:\n{end}")
            self._open.ended = self._open.ended or str(status)
            repair(self.run)
            fault = self.faults[len(self.rows) - 1]
            if fault.what in DAMAGES:
                damage(fault.what, self.run)
        self._close(self._open)
        if self._waiting:
            unmet = ", ".join(f"{fault.name} in {fault.phase}" for fault in self._waiting)
            raise RuntimeError(f"the run ended before it met these faults: {unmet}")
        left = self._left(before)
        for row in self.rows:
            row.left += left
        return self.rows

    def _attempt(self, *, resume: bool) -> int:
        """The exit status of the run, started once."""
        ours, theirs = socket.socketpair()
        arguments = [*self.command, f"trainer.output_dir={self.run}"]
        arguments += ["trainer.resume=auto"] * resume
        command = [sys.executable, "-m", "tests.chaos.driver", str(theirs.fileno()), *arguments]
        environment = os.environ | {
            MARK: str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join(
                [str(self.folder.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
            ),
        }
        if self._waiting and self._waiting[0].phase == START:
            self.log.touch()
            self._meet(self._waiting.popleft(), 0, os.getpid())
        with self.log.open("a") as log, ours:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
            theirs.close()
            try:
                for phase in phases(ours):
                    self._take(phase, process.pid, ours)
                return process.wait(HANG_S)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()

    def _take(self, phase: str, driver: int, connection: socket.socket) -> None:
        """The run waits at the start of a phase: meet what is due in it, and let it go on."""
        step = self.next_step
        # A full disk stays full until the run has ended and someone has made room.
        is_full = (self.run / FILLER).exists()
        if self._open is not None and step > self._open.step and not is_full:
            self._close(self._open)
        due = self._waiting[0] if self._waiting and self._open is None else None
        if due is None or due.phase != phase or step < due.step:
            connection.send(b"\n")
            return
        wait_s = 0.4 * self.phase_s.get(phase, 0.0)
        if wait_s > 0.1:  # within the phase, else at its start
            connection.send(b"\n")
            select.select([connection], [], [], wait_s)
        self._meet(self._waiting.popleft(), step, driver)
        if wait_s <= 0.1:
            with suppress(OSError):  # it may have been killed
                connection.send(b"\n")

    def _meet(self, fault: Fault, step: int, driver: int) -> None:
        self._open = Row(fault.name, fault.phase, step)
        self.rows.append(self._open)
        self._logged = self.log.stat().st_size
        self._began = time.monotonic()
        inject(fault, driver, self.run)

    def _close(self, row: Row | None) -> None:
        if row is None:
            return
        row.seconds = time.monotonic() - self._began
        with self.log.open("rb") as log:
            log.seek(self._logged)
            row.said = what_was_said(log.read().decode(errors="replace"))
        resumed = re.findall(r"(?:from the checkpoint of|resumed after) step (\d+)", row.said)
        row.steps_lost = max(0, row.step - 1 - int(resumed[-1])) if resumed else 0
        self._open = None

    @property
    def next_step(self) -> int:
        """The one that has no row of metrics yet."""
        last = last_step(self.run)
        return 0 if last is None else last + 1

    def _left(self, before: set[str]) -> list[str]:
        """What is left of the run, once it has had `LEAVE_S`."""
        end = time.monotonic() + LEAVE_S
        while (left := list(self._processes())) and time.monotonic() < end:
            time.sleep(0.5)
        return [
            *(f"process {' '.join(one.cmdline())[:60]}" for one in left),
            *(f"TMPDIR/{name}" for name in sorted(os.listdir(self.folder / "tmp"))),
            *(f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - before)),
        ]

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_running = process.status() != psutil.STATUS_ZOMBIE
                if is_running and process.environ().get(MARK) == str(self.folder):
                    yield process


def phases(connection: socket.socket) -> Iterator[str]:
    """The phases that a run begins, until it has ended.

    Raises:
        Hung: there was none for `HANG_S`.
    """
    connection.settimeout(HANG_S)
    rest = b""
    while True:
        try:
            piece = connection.recv(4096)
        except TimeoutError as error:
            raise Hung(f"nothing was heard of the run for {HANG_S:.0f} s") from error
        except ConnectionResetError:
            return
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)
