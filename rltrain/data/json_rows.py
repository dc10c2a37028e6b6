"""Rows of a JSON file: one object per line, or an array of objects, plain or compressed."""

import bz2
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.config.data import LimitsConfig
from rltrain.data.bad_rows import BadRow
from rltrain.data.limits import MIB, Decompressed, over_limit

Row = dict[str, Any]


@dataclass(frozen=True)
class SameAs:
    """A row that is byte for byte equal to an earlier row of its file."""

    number: int


LOOKS_LIKE = (
    (b"\x1f\x8b", "it is compressed with gzip: let its name end in .gz"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstandard: let its name end in .zst"),
    (b"PAR1", "it is a Parquet file: set data=parquet"),
    (b"PK\x03\x04", "it is a zip archive: unpack it first"),
    (b"\xff\xfe", "it is UTF-16 text: write it as UTF-8"),
    (b"\xfe\xff", "it is UTF-16 text: write it as UTF-8"),
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer, not the data: git lfs pull fetches that",
    ),
    (b"<", "it is XML or HTML, perhaps a web page about the file"),
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def json_rows(file: Path, limits: LimitsConfig) -> Iterator[Row | BadRow | SameAs]:
    """The rows of a file. An object is a row; a list of objects has columns ``0``, ``1``, ...

    A line that is no row is yielded as an error, so that it can be counted.

    Raises:
        ValueError: the file is not JSON at all, one object that holds the rows, or beyond the
            limits.
        OSError: it cannot be read.
    """
    try:
        with _open(file, limits) as content:
            start = content.peek(4096)[:4096].removeprefix(BYTE_ORDER_MARK)
            for magic, advice in LOOKS_LIKE:
                if start.startswith(magic):
                    raise ValueError(f"{file} is not JSON: {advice} [RL2003]")
            array = None
            if start.lstrip().startswith(b"["):
                array = _array(file, limits)
            yield from _lines(content, file, limits) if array is None else map(_row, array)
    except EOFError as error:
        raise ValueError(f"{file} is cut off: {error} [RL2003]") from error
    except zlib.error as error:
        raise ValueError(f"{file} cannot be decompressed: {error} [RL2003]") from error


def _open(file: Path, limits: LimitsConfig) -> io.BufferedReader:
    """The file's content after decompression, as a buffered binary stream."""
    decompress = DECOMPRESS.get(file.suffix.lower())
    if decompress is None:
        return file.open("rb")
    return io.BufferedReader(Decompressed(decompress(file), file, limits))


def _zstandard(file: Path) -> Any:
    import pyarrow  # takes 0.3 s, and only this format needs it

    return pyarrow.input_stream(file, compression="zstd")


DECOMPRESS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _zstandard,
}


def _split(content: io.BufferedReader, file: Path, limits: LimitsConfig) -> Iterator[bytes]:
    """The lines of a file.

    Raises:
        ValueError: one is too long. What follows is not read: it might never end.
    """
    most = limits.row_mib * MIB
    number = 0
    while line := content.readline(most + 1):
        number += 1
        if len(line) > most:
            found = f"line {number}: expected at most {limits.row_mib} MiB, found more"
            raise over_limit(file, found, "row_mib", limits.row_mib)
        yield line


def _lines(
    content: io.BufferedReader, file: Path, limits: LimitsConfig
) -> Iterator[Row | BadRow | SameAs]:
    seen: dict[bytes, int] = {}
    lines = enumerate(_split(content, file, limits), start=1)
    numbered = ((number, line) for number, line in lines if line.strip())
    for row_number, (number, line) in enumerate(numbered):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        digest = hashlib.blake2b(line.strip(), digest_size=16).digest()
        first = seen.setdefault(digest, row_number)
        if first != row_number:
            yield SameAs(first)
            continue
        try:
            yield _row(_parse(line), f"line {number}: ")
        except ValueError as error:
            if row_number == 0:
                _check_is_lines(file, limits)
            yield BadRow("a line is not JSON", f"line {number}: not JSON ({_why(error)})")


def _why(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8"
    return str(error)


def _parse(text: bytes) -> Any:
    """Raises ValueError when it is not JSON."""
    try:
        return DECODER.decode(text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> Row:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r} twice")
    return members


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _row(value: Any, where: str = "") -> Row | BadRow:
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return BadRow("a row is no object", f"{where}expected an object, found {type(value).__name__}")


def _array(file: Path, limits: LimitsConfig) -> list[Any] | None:
    """The array that is all of the file; None where more follows it, as in lines of arrays."""
    most = limits.array_mib * MIB
    with _open(file, limits) as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        # Lines of arrays may be as many as they like.
        if _is_json(content[: limits.row_mib * MIB].partition(b"\n")[0]):
            return None
        found = f"expected a JSON array of at most {limits.array_mib} MiB, found more"
        raise over_limit(file, f"{found}, or write JSON lines", "array_mib", limits.array_mib)
    try:
        value = _parse(content.removeprefix(BYTE_ORDER_MARK))
    except ValueError as error:
        if str(error).startswith("Extra data"):
            return None
        raise ValueError(f"{file} is not JSON: {_why(error)} [RL2003]") from error
    assert isinstance(value, list)
    return value


def _is_json(text: bytes) -> bool:
    try:
        _parse(text)
    except ValueError:
        return False
    return True


def _check_is_lines(file: Path, limits: LimitsConfig) -> None:
    """Raises ValueError when all of the file is one object, over several lines."""
    with _open(file, limits) as opened:
        content = opened.read(limits.array_mib * MIB)
        try:
            value = _parse(content.removeprefix(BYTE_ORDER_MARK))
        except ValueError:
            return
    if isinstance(value, dict):
        keys = ", ".join(map(repr, list(value)[:6]))
        raise ValueError(
            f"{file} is one JSON object over several lines, with {keys}: expected one object per "
            "line, or an array of objects (pandas: to_json(..., orient='records'))"
            " [RL2003]"
        )
