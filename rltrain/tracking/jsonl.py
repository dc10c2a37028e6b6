"""JSON lines, each with a step: metrics, samples, rollouts and alerts of a run.

A line is with the operating system before the next step starts, so a killed run loses at most a
torn last line. A power cut may tear what was written since `JsonlWriter.sync`. What is torn is at
the end of the file, where readers and writers cut it off.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.config.durable import explained, write_durably


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All lines up to the last complete one; none when there is no such file.

    Raises:
        ValueError: when a line before it is not a JSON object with an int ``step``.
    """
    return _rows(path)


def _rows(path: Path, first_step: float = math.inf) -> list[dict[str, Any]]:
    """Of the steps before ``first_step``. What follows the last of them may be torn: cut short,
    with bytes that are NUL or no text."""
    # What follows the last newline is empty, or torn.
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    rows = [_parse(line) for line in lines]
    kept = [n for n, row in enumerate(rows) if row is not None and row["step"] < first_step]
    for n in range(kept[-1] if kept else 0):
        if rows[n] is None:
            raise ValueError(
                f"{path}:{n + 1}: expected a JSON object with an int 'step', found "
                f"{lines[n][:80].decode(errors='replace')!r} [RL7002]"
            )
    return [row for n in kept if (row := rows[n]) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode())
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class JsonlWriter:
    """Appends one line per call and flushes it.

    Args:
        first_step: the step the run starts or resumes at. Lines of that step and later are dropped
            first: they belong to a run that was cut off and will be written again.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        if path.is_file():
            write_durably(path, "".join(map(_line, _rows(path, first_step))))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append ``values`` of ``step``. A NaN or infinity becomes null, which is valid JSON, also
        in lists and objects.

        Raises:
            OSError: when the line cannot be written; says what to do where the disk is full.
        """
        try:
            self._file.write(_line({"step": step, **values}))
            self._file.flush()
        except OSError as error:
            raise explained(error, self.path) from error

    def sync(self) -> None:
        """Bring what was written to the disk, so that it survives a power cut.

        Raises:
            OSError: as `write`.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise explained(error, self.path) from error

    def close(self) -> None:
        """Close; a line that could not be written has been reported by ``write`` already."""
        try:
            self._file.close()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
