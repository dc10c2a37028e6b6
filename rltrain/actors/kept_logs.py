"""Logs of a run when it is over: Ray's are copied into the run's folder, and secrets are masked.

An actor's output goes from its file descriptors into its file, without a process between them, so
that nothing of a crash is lost. So a secret may stand in the file for `rltrain.actors.guardian`'s
``SWEEP_S``, if it is known by value, and otherwise until the end of the run.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rltrain.config.redact import Redactor

RAY_LOGS = "ray-logs"
PATTERNS = ("gcs_server*", "raylet*", "worker-*", "python-core-*")
"""Of Ray's own logs, those that say why something died."""
TAIL = 2**18
MOST_FILES = 40
MOST_SESSIONS = 5
BLOCK = 2**20
CAPPED = "reward-"
"""Logs whose older half is cut when they grow; only their writer may write to them meanwhile."""


def copy_ray_logs(ray: Path, run_dir: Path, redactor: Redactor) -> None:
    """Copy the ends of the newest logs of each session of Ray below ``ray``."""
    kept = run_dir / RAY_LOGS
    if kept.is_symlink():
        kept.unlink()
    for session in sorted(ray.glob("session_2*")):
        logs = [file for pattern in PATTERNS for file in (session / "logs").glob(pattern)]
        chosen = sorted((f for f in logs if f.is_file() and f.stat().st_size), key=_changed)
        for file in chosen[-MOST_FILES:]:
            with file.open("rb") as opened:
                opened.seek(max(0, file.stat().st_size - TAIL))
                text = opened.read().decode(errors="replace")
            (kept / session.name).mkdir(parents=True, exist_ok=True)
            (kept / session.name / file.name).write_text(redactor.text(text))
    for old in sorted(kept.glob("session_2*"))[:-MOST_SESSIONS]:
        shutil.rmtree(old, ignore_errors=True)


def _changed(file: Path) -> float:
    return file.stat().st_mtime


def redact_logs(logs: Path, redactor: Redactor) -> None:
    """Take the secrets out of the logs. Nobody writes to them any more. Where the disk is full, a
    log keeps its size, and what does not fit is cut off its end."""
    for file in sorted(logs.glob("*.log")):
        with file.open("rb") as source:
            if all(clean == block for block, clean in _redacted(source, redactor)):
                continue
        partial = file.with_name(f".{file.name}.partial")
        try:
            with file.open("rb") as source, partial.open("wb") as target:
                target.writelines(clean for _, clean in _redacted(source, redactor))
            shutil.copymode(file, partial)
            os.replace(partial, file)
        except OSError:
            partial.unlink(missing_ok=True)
            with file.open("r+b") as log:
                clean = b"".join(clean for _, clean in _redacted(log, redactor))
                size = log.seek(0, os.SEEK_END)
                log.seek(0)
                log.write(clean[:size])
                log.truncate()


def _redacted(source: Iterator[bytes], redactor: Redactor) -> Iterator[tuple[bytes, bytes]]:
    """Each block of a log, and what is left of it."""
    for block in _blocks(source):
        text = redactor.text(block.decode(errors="surrogateescape"))
        yield block, text.encode(errors="surrogateescape")


def _blocks(source: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines, of about `BLOCK` bytes together."""
    lines: list[bytes] = []
    size = 0
    for line in source:
        lines.append(line)
        size += len(line)
        if size >= BLOCK:
            yield b"".join(lines)
            lines, size = [], 0
    if lines:
        yield b"".join(lines)


@dataclass
class Sweep:
    """Masks known values in logs that are still written. The length stays, and what others append
    is not touched."""

    logs: Path
    _at: dict[str, int] = field(default_factory=dict)

    def sweep(self, redactor: Redactor) -> None:
        """What was written since the last time."""
        secrets = [secret.encode() for secret in redactor.secrets]
        if not secrets:
            return
        for path in self.logs.glob("*.log"):
            if not path.name.startswith(CAPPED):
                with suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
                    self._at[path.name] = _mask(file.fileno(), self._at.get(path.name, 0), secrets)


def _mask(file: int, start: int, secrets: list[bytes]) -> int:
    """Returns where to go on: a secret may have been written in part."""
    longest = max(map(len, secrets))
    size = os.fstat(file).st_size
    while start < size:
        found = os.pread(file, BLOCK, start)
        for secret in secrets:
            at = found.find(secret)
            while at >= 0:
                os.pwrite(file, b"*" * len(secret), start + at)
                at = found.find(secret, at + len(secret))
        if len(found) < BLOCK:
            break
        start += len(found) - longest + 1
    return max(0, size - longest + 1) if size else 0
