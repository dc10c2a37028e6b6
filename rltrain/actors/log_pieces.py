"""The logs of a node that does not have the run's folder, sent to the controller in pieces."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rltrain.config.redact import Redactor

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
    """Below what an earlier start of the run left in the file. Secrets that are known by value are
    masked, also where two pieces meet; the length stays, since the next piece goes by it."""
    secrets = [secret.encode() for secret in Redactor().secrets]
    overlap = max(map(len, secrets), default=1) - 1
    with os.fdopen(os.open(folder / piece.name, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - overlap))
        start, data = file.tell(), file.read() + piece.data
        for secret in secrets:
            data = data.replace(secret, b"*" * len(secret))
        file.seek(start)
        file.write(data)
