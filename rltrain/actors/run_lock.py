"""One run writes to a folder at a time: a lock that ends with the process that holds it.

The kernel lets go of the lock of a process that is gone, so a folder is never locked for good. Not
every network file system passes locks on to other hosts. There the holder's heartbeat decides: it
touches the file, and a file that was not touched for `STALE_S` is that of a process that is gone.
Two starts within a second on two such hosts are not told apart.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAME = "run.lock"
BEAT_S = 5.0
STALE_S = 60.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder within. The folder is made, and removed at the end if nothing
    else was put into it.

    Raises:
        ValueError: another run holds it, or the folder cannot be written.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _taken(folder)
    except OSError as error:
        _remove_empty(new)
        raise unwritable(folder, error) from error
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(file, ended), name="run-lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        with suppress(OSError):  # the disk may be read-only by now; closing lets go of the lock
            (folder / NAME).unlink()
        os.close(file)
        _remove_empty(new)


def unwritable(folder: Path, error: OSError) -> ValueError:
    """What is said of a run's folder that cannot be written."""
    return ValueError(
        f"trainer.output_dir={folder}: expected a folder that can be written, found: "
        f"{error.strerror}. Choose another folder [RL6001]"
    )


def _taken(folder: Path) -> int:
    """The locked file, which says who holds it."""
    while True:
        # Not flock: processes that the holder forks would go on holding it.
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            locked = _lock(file, folder)
            if not _is_at(file, folder / NAME):  # the last holder removed it meanwhile
                os.close(file)
                continue
            holder = _read(file)
            if holder and not (locked and holder.get("boot") == _boot()):
                _await_stale(file, folder, holder)
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_self()).encode(), 0)
        except BaseException:
            with suppress(OSError):
                os.close(file)
            raise
        return file


def _lock(file: int, folder: Path) -> bool:
    """False where the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise _in_use(folder, _read(file)) from error
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _await_stale(file: int, folder: Path, holder: dict[str, Any]) -> None:
    """Return once the holder has not touched the file for `STALE_S`, by the file system's clock.

    Raises:
        ValueError: it does touch it.
    """
    logger.warning("%s: waiting up to %d s for a sign of %s", folder, STALE_S, _named(holder))
    before = os.fstat(file).st_mtime
    while _now(folder) - before < STALE_S:
        time.sleep(BEAT_S / 5)
        if os.stat(folder / NAME).st_mtime != before:
            raise _in_use(folder, holder)


def _now(folder: Path) -> float:
    """Seconds since 1970 by the clock that dates the files of ``folder``."""
    probe = folder / f".{NAME}.{os.getpid()}.partial"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _in_use(folder: Path, holder: dict[str, Any]) -> ValueError:
    return ValueError(
        f"trainer.output_dir={folder}: expected a folder that no run writes to, found "
        f"{_named(holder)}: wait for it or end it, or choose another folder [RL6016]"
    )


def _named(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run"
    process = f"process {holder.get('pid')} on {holder.get('host')}"
    return f"the run of {process}, started at {holder.get('started')}"


def _self() -> dict[str, Any]:
    started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    host = socket.gethostname()
    return {"pid": os.getpid(), "host": host, "boot": _boot(), "started": started}


def _boot() -> str:
    """Of this machine since it was started; containers on it have the same."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()


def _read(file: int) -> dict[str, Any]:
    """What the holder wrote; empty where it was killed before it could."""
    try:
        holder = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _beat(file: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):  # the run's own writes say what is wrong with the disk
            os.utime(file)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # the run has written to it
            folder.rmdir()
