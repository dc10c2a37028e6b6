"""What processes leave in /dev/shm when they are killed: Python's semaphores and segments.

A process of Python's removes them at its end, and where it was killed, its resource tracker does;
Ray kills that one, too.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import process as multiprocessing_process
from pathlib import Path

import psutil

FOLDER = Path("/dev/shm")
_OURS = re.compile(r"(?:sem\.|psm_|torch_|nccl-)[\w.\-]+")
"""Names that multiprocessing, torch and NCCL give."""


def name_semaphores(token: str) -> None:
    """Semaphores of this process, and of those that it starts with multiprocessing, are called
    ``sem.TOKEN-...`` from now on."""
    # As multiprocessing hands it on to children; there is no public way to choose it.
    multiprocessing_process.current_process()._config["semprefix"] = f"/{token}"  # type: ignore[attr-defined]


def mapped_by(processes: Iterable[psutil.Process]) -> set[str]:
    """Names in /dev/shm of what these have mapped, and what was not removed yet."""
    inodes: set[int] = set()
    for process in processes:
        with suppress(OSError):  # it has ended, or is another user's
            inodes.update(_inodes(Path(f"/proc/{process.pid}/maps").read_text()))
    return {name for name, inode in _named() if inode in inodes and _OURS.fullmatch(name)}


def _inodes(maps: str) -> Iterator[int]:
    """Not names: a semaphore is made under another name than it has later."""
    for line in maps.splitlines():
        if f" {FOLDER}/" in line:
            yield int(line.split()[4])


def _named() -> Iterator[tuple[str, int]]:
    if FOLDER.is_dir():
        for entry in os.scandir(FOLDER):
            yield entry.name, entry.inode()


def remove(names: Iterable[str], token: str) -> None:
    """Remove these, and all semaphores of `name_semaphores`, when their processes have ended."""
    for file in {FOLDER / name for name in names} | set(FOLDER.glob(f"sem.{token}-*")):
        with suppress(OSError):
            file.unlink(missing_ok=True)
