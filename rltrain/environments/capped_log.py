"""A log of a reward worker that keeps what was written last."""

import os
from pathlib import Path


class CappedLog:
    """A file to which is appended. Beyond ``max_bytes`` its first half is cut, and it says so.

    Args:
        max_bytes: None: no limit
    Raises:
        OSError: the file cannot be opened. `write` raises it too, for a full disk.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._cut_bytes = 0
        self._file = path.open("ab+", buffering=0)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        size = self._file.seek(0, os.SEEK_END)
        if self._max_bytes is not None and size > self._max_bytes:
            self._cut(size, self._max_bytes // 2)

    def _cut(self, size: int, kept: int) -> None:
        self._file.seek(size - kept)
        rest = self._file.read(kept)
        rest = rest[rest.find(b"\n") + 1 :]  # from a line's start, where there is one
        self._cut_bytes += size - len(rest)
        self._file.truncate(0)
        note = f"=== {self._cut_bytes} bytes before this line were cut: data.reward.limits.log_mib"
        self._file.write(f"{note} ===\n".encode() + rest)
