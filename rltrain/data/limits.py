"""Limits of what is read of a data file, so that a small file cannot fill the memory.

What is refused names the key that allows it (``data.limits``).
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rltrain.config.data import LimitsConfig
from rltrain.data.bad_rows import BadRow

MIB = 2**20
ALWAYS_READ = 64 * MIB
"""Bytes that a compressed file may hold, however small it is."""


def over_limit(file: Path, found: str, key: str, value: int) -> ValueError:
    """The error of a file that holds more than ``data.limits.KEY`` allows."""
    return ValueError(
        f"{file}: {found}. If the file is what it should be, raise data.limits.{key}, which is "
        f"{value} [RL2019]"
    )


def check_row(row: Any, limits: LimitsConfig) -> Any:
    """``row``, which is plain data.

    Raises:
        BadRow: it is too deep, or holds too much text.
    """
    level, depth, size = [row], 0, 0
    while level:
        inside = [value for value in level if isinstance(value, Mapping | list | tuple)]
        depth += bool(inside)
        if depth > limits.depth:
            raise BadRow(
                "nested too deeply",
                f"expected at most {limits.depth} lists and objects within each other, found more: "
                "raise data.limits.depth if that is right",
            )
        size += sum(len(value) for value in level if isinstance(value, str | bytes))
        if size > limits.row_mib * MIB:
            raise too_long(limits)
        members = (v.values() if isinstance(v, Mapping) else v for v in inside)
        level = [item for of in members for item in of]
    return row


def too_long(limits: LimitsConfig) -> BadRow:
    return BadRow(
        "the row is too long",
        f"expected at most {limits.row_mib} MiB of text, found more: raise data.limits.row_mib if "
        "that is right",
    )


def most_bytes(file: Path, limits: LimitsConfig) -> int:
    """How much a compressed file may hold."""
    return max(ALWAYS_READ, limits.expansion * file.stat().st_size)


def too_much(file: Path, limits: LimitsConfig) -> ValueError:
    """The error of a compressed file that holds more than `most_bytes`."""
    size, most = file.stat().st_size, most_bytes(file, limits) // MIB
    found = f"expected at most {most} MiB in these {size} bytes, found more"
    return over_limit(file, found, "expansion", limits.expansion)


class Decompressed(io.RawIOBase):
    """The content of a compressed file, as long as it is not too much for the file's size.

    Args:
        content: is decompressed while it is read, and closed with this
    """

    def __init__(self, content: BinaryIO, file: Path, limits: LimitsConfig) -> None:
        self._content, self._file, self._limits = content, file, limits
        self._left = most_bytes(file, limits)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises ``ValueError`` when it becomes too much."""
        data = self._content.read(min(len(buffer), MIB))  # some reserve as much as is asked for
        self._left -= len(data)
        if self._left < 0:
            raise too_much(self._file, self._limits)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._content.close()
        super().close()
