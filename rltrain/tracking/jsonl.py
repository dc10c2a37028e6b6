"""JSON lines, each with a step: metrics, samples, rollouts and alerts of a run.

A line is complete on disk before the next step starts, so a killed run loses at most a torn last
line, which the reader drops.
"""

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete lines; none when there is no such file.

    Raises:
        ValueError: when a line other than the last is not a JSON object with an int ``step``.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # What follows the last newline is empty, or torn by a kill or a full disk.
    return [_parse(line, path, number) for number, line in enumerate(lines[:-1], start=1)]


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{number}: expected a JSON object, found {line[:80]!r} [RL7002]"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError(
            f"{path}:{number}: expected an object with an int 'step', found {line[:80]!r} [RL7002]"
        )
    return row


class JsonlWriter:
    """Appends one line per call and flushes it.

    Args:
        first_step: the step the run starts or resumes at. Lines of that step and later are dropped
            first: they belong to a run that was cut off and will be written again.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        kept = [row for row in read_jsonl(path) if row["step"] < first_step]
        if path.is_file():
            _replace(path, kept)
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
            raise _explained(error, self.path) from error

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


def _replace(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the file anew, beside the old one and swapped in by rename."""
    beside = path.with_name(path.name + ".partial")
    try:
        beside.write_text("".join(_line(row) for row in rows), encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise _explained(error, path) from error


def _explained(error: OSError, path: Path) -> OSError:
    if error.errno != errno.ENOSPC:
        return error
    return OSError(
        errno.ENOSPC,
        f"the disk that holds {path} is full: free some space and start again with "
        "trainer.resume=auto [RL6005]",
    )
