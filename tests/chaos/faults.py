"""What goes wrong: a process that is killed or stopped, a signal, a full disk, a broken file."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rltrain.actors.actor_log import LOG
from rltrain.controller.run_checkpoint import checkpoints

PHASES = (
    "generate",
    "reward",
    "old_logprobs",
    "update",
    "weight_sync",
    "checkpoint",
    "eval",
)
START = "start"
"""Called a phase: before the command is given."""
CONTINUE_S = 5.0
"""How long a driver is stopped. Nobody watches it: whoever stopped it lets it go on."""
ROOM = 64 << 10
"""Bytes that a full disk has left."""


@dataclass(frozen=True)
class Fault:
    """``what`` happens to ``who`` in a phase of a step."""

    who: str
    what: str
    phase: str
    step: int

    @property
    def name(self) -> str:
        return f"{self.who}: {self.what}"


def _logs_to(name: str) -> Callable[[psutil.Process], bool]:
    return lambda process: Path(process.environ().get(LOG, "")).stem == name and _is_actor(process)


def _is_actor(process: psutil.Process) -> bool:
    return "ray::" in " ".join(process.cmdline())


def _is_reward_worker(process: psutil.Process) -> bool:
    is_one = "rltrain.environments.reward_worker" in process.cmdline()
    return is_one and not process.children()  # its supervisor has the same command


PROCESSES: Mapping[str, Callable[[psutil.Process], bool]] = {
    "engine": _logs_to("engine-0"),
    "EngineCore": lambda process: "EngineCore" in " ".join(process.cmdline()),
    "policy rank": _logs_to("policy-0"),
    "critic rank": _logs_to("critic-0"),
    "reward worker": _is_reward_worker,
    "route store": lambda process: "ray::_RouteStore" in " ".join(process.cmdline()),
    "raylet": lambda process: process.name() == "raylet",
    "GCS": lambda process: process.name() == "gcs_server",
}
"""By role: which descendant of the driver it is."""


def find(who: str, driver: int) -> list[psutil.Process]:
    """The processes of a role."""
    if who == "driver":
        return [psutil.Process(driver)]
    return list(_matching(PROCESSES[who], driver))


def _matching(chosen: Callable[[psutil.Process], bool], driver: int) -> Iterator[psutil.Process]:
    for process in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if chosen(process):
                yield process


def inject(fault: Fault, driver: int, run: Path) -> None:
    """Do it now.

    Raises:
        LookupError: there is no such process.
    """
    if fault.what == "disk full":
        fill(run)
        return
    found = find(fault.who, driver)
    if not found:
        raise LookupError(f"no {fault.who} among the processes below {driver}")
    what = "SIGKILL" if fault.what in DAMAGES else fault.what
    found[0].send_signal(signal.Signals[what])
    if fault.who == "driver" and what == "SIGSTOP":
        time.sleep(CONTINUE_S)
        found[0].send_signal(signal.SIGCONT)


def fill(run: Path) -> None:
    """Leave `ROOM` on the disk of the run's folder, which has to be a small one."""
    size = psutil.disk_usage(str(run)).free
    assert size < 1 << 30, f"{run} is on a disk with {size} bytes free: that is no small disk"
    with suppress(OSError), (run / FILLER).open("wb") as file:  # the run may be quicker
        file.write(bytes(max(0, size - ROOM)))


FILLER = "filler"


def _truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "newest checkpoint: largest file truncated": _truncate,
    "newest checkpoint: one bit flipped": _flip,
    "newest checkpoint: largest file removed": Path.unlink,
    "newest checkpoint: manifest removed": lambda file: (
        _checkpoint_of(file) / "manifest.json"
    ).unlink(),
}
"""By what is said of it: done to the largest file of the newest checkpoint, once the driver was
killed."""


def _checkpoint_of(file: Path) -> Path:
    return next(parent for parent in file.parents if (parent / "manifest.json").exists())


def damage(what: str, run: Path) -> None:
    newest = checkpoints(run)[-1]
    largest = max(
        (file for file in newest.rglob("*") if file.is_file()), key=lambda f: f.stat().st_size
    )
    DAMAGES[what](largest)


def repair(run: Path) -> None:
    """What a person does before the run is started again."""
    (run / FILLER).unlink(missing_ok=True)
