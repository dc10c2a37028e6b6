"""Columns of a row by dotted names, and their kinds of values."""

from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice

MISSING = object()
"""What `find_column` returns for a column that a row lacks. Null would be a value."""

NUM_NAMED = 12
"""Maximum number of columns that a message lists."""

KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    ((float, Decimal), "number"),
    ((bytes, bytearray), "bytes"),
    ((date, time, timedelta), "date or time"),
    (Mapping, "object"),
)


def find_column(row: object, name: str) -> object:
    """The value of column ``name``, or `MISSING`.

    A dot selects a member of an object or, with a number, an item of a list:
    ``reward_model.ground_truth``, ``completion.0.content``. Names that contain dots take
    precedence."""
    if isinstance(row, list):
        first, dot, rest = name.partition(".")
        if not first.isdecimal() or int(first) >= len(row):
            return MISSING
        value = row[int(first)]
        return find_column(value, rest) if dot else value
    if not isinstance(row, Mapping):
        return MISSING
    if name in row:
        return row[name]
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        head = ".".join(parts[:cut])
        if head in row:
            value = find_column(row[head], ".".join(parts[cut:]))
            if value is not MISSING:
                return value
    return MISSING


def leaves(row: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted names and values of all columns; members of objects instead of the objects."""
    for key, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def kind_of(value: object) -> str:
    """The kind of a value: ``text``, ``messages``, ``integer``, ``null``, ..."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "messages" if is_messages(value) else "list"
    return next((kind for types, kind in KINDS if isinstance(value, types)), type(value).__name__)


def describe_value(value: object) -> str:
    """The kind and the start of a value for a message, such as ``integer '3'``, or ``null``."""
    return "null" if value is None else f"{kind_of(value)} {str(value)[:60]!r}"


def is_messages(value: object) -> bool:
    """Whether a value is a list of objects with ``role`` and ``content``."""
    return isinstance(value, list) and bool(value) and all(_is_message(item) for item in value)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value and "content" in value


def listed(row: Mapping[str, object]) -> str:
    """Names of the columns of a row for a message; nested columns are dotted."""
    names = [repr(name) for name, _ in islice(leaves(row), NUM_NAMED + 1)]
    more = ", ..." if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more if names else "none"
