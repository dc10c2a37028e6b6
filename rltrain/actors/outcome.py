"""``outcome.json`` of a run; a run whose process was killed cannot write it itself."""

import fcntl
import json
import os
import struct
from datetime import UTC, datetime
from pathlib import Path

from rltrain.actors.run_lock import NAME as LOCK
from rltrain.config.durable import write_durably

OUTCOME = "outcome.json"
"""Says how a run ended; missing while it runs."""
KILLED = (
    "the process of the run ended without a word: it was killed (SIGKILL), most often by the "
    "kernel for lack of memory, or by Ray after Ray itself had died. Go on from the last "
    "checkpoint with trainer.resume=auto [RL5020]"
)
_LOCK = "hhqqi"
"""``struct flock`` of Linux: type, whence, start, length, process."""


def record(run_dir: Path, state: str, step: int | None, error: str | None) -> None:
    """Write how a run ended, after which step, and by which error."""
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = {"state": state, "step": step, "error": error, "ended": ended}
    write_durably(run_dir / OUTCOME, json.dumps(outcome, indent=2) + "\n")


def write_killed(run_dir: Path, began: float) -> bool:
    """Write the outcome of a run that is gone, unless it has done so itself since ``began``, in
    seconds since 1970, or another run has the folder by now. Returns whether it was written."""
    file = run_dir / OUTCOME
    if is_locked(run_dir) or (file.exists() and file.stat().st_mtime >= began):
        return False
    record(run_dir, "killed", _last_step(run_dir / "metrics.jsonl"), KILLED)
    return True


def is_locked(run_dir: Path) -> bool:
    """Whether a process writes to the folder, without taking its lock for a moment."""
    try:
        file = os.open(run_dir / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[0]
        return bool(kind != fcntl.F_UNLCK)
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)


def _last_step(file: Path) -> int | None:
    """As `rltrain.tracking.tracker.last_step`, which refuses a file with a broken line; here nobody
    would see that."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None
