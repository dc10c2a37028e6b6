"""The logs of a node that does not have the run's folder, sent to the controller in pieces."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PIECE = 2**20
"""The most bytes of one log in a piece."""


class LogPiece(NamedTuple):
    """Bytes that follow on those that the controller has."""

    name: str
    """Of the file, such as ``policy-3.log``."""
    data: bytes
    left: int
    """Bytes that are still to be sent."""


def read_pieces(folder: Path, at: Mapping[str, int]) -> list[LogPiece]:
    """What was written to the logs in ``folder`` after the first ``at[name]`` bytes."""
    pieces = []
    for file in sorted(folder.glob("*.log")):
        start = at.get(file.name, 0)
        size = file.stat().st_size
        if size > start:
            with file.open("rb") as opened:
                opened.seek(start)
                data = opened.read(PIECE)
            pieces.append(LogPiece(file.name, data, max(0, size - start - len(data))))
    return pieces


def append_piece(folder: Path, piece: LogPiece) -> None:
    """Below what an earlier start of the run left in the file."""
    with (folder / piece.name).open("ab") as file:
        file.write(piece.data)
