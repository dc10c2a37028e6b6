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
        self._file = path.open("ab+", buffering=0)
        self._all_bytes = self._file.seek(0, os.SEEK_END)  # that were there or written

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._all_bytes += len(data)
        size = self._file.seek(0, os.SEEK_END)
        if self._max_bytes is not None and size > self._max_bytes:
            self._cut(size, self._max_bytes // 2)

    def _cut(self, size: int, kept: int) -> None:
        self._file.seek(size - kept)
        rest = self._file.read(kept)
        rest = rest[rest.find(b"\n") + 1 :]  # from a line's start, where there is one
        cut = self._all_bytes - len(rest)
        self._file.truncate(0)
        note = f"=== {cut} bytes before this line were cut: data.reward.limits.log_mib ===\n"
        self._file.write(note.encode() + rest)
