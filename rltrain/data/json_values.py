"""Converts values of a dataset to plain JSON values, which reward functions get in any process.

| value | becomes |
|---|---|
| text, integers, booleans, null | themselves |
| a float | itself; NaN, which pandas writes for null, becomes null |
| lists, tuples, NumPy arrays | lists |
| objects | objects; keys that are integers become text |
| dates and times | ISO 8601 text |
| durations | seconds |
| decimals | their digits as text |
| bytes | Base64 text |
| UUIDs | text |

Other values, infinities and text that is not Unicode are rejected.
"""

import base64
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from rltrain.data.bad_rows import BadRow

Json = Any
"""None, bool, int, float, str, and lists and dictionaries of these."""


def as_json(value: object, name: str) -> Json:
    """``value`` as a plain JSON value (the table above).

    Raises:
        BadRow: it has none; the message names the column ``name``, or the place within it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_text(value, name)
    if _is_numpy(value):
        return as_json(value.tolist(), name)  # type: ignore[attr-defined]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _float(value, name)
    if isinstance(value, Mapping):
        return {_key(key, name): as_json(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, f"{name}.{number}") for number, item in enumerate(value)]
    return _as_text(value, name)


def _is_numpy(value: object) -> bool:
    """A NumPy scalar or array of booleans, numbers or text. NumPy is not imported to find out."""
    dtype: Any = getattr(value, "dtype", None)
    return type(value).__module__ == "numpy" and (
        dtype.kind in "biuU" or dtype.name in ("float16", "float32", "float64")
    )


def check_text(text: str, name: str) -> str:
    """The text, which UTF-8 can write.

    Raises:
        BadRow: half of a surrogate pair stands in it, as where a cut went through an emoji.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise BadRow(
            "text is not Unicode",
            f"column {name!r} has half of a surrogate pair, \\u{code:04x}, at character "
            f"{error.start}: an emoji was cut there",
        ) from error
    return text


def _float(value: float, name: str) -> float | None:
    if math.isinf(value):
        raise BadRow("an infinite number", f"column {name!r} is {value}, which JSON cannot say")
    return None if math.isnan(value) else float(value)


def _key(key: object, name: str) -> str:
    if isinstance(key, str):
        return check_text(key, name)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise BadRow("a key is not text", f"column {name!r} has the key {key!r}, which JSON cannot say")


def _as_text(value: object, name: str) -> Json:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, UUID):
        return str(value)
    raise BadRow(
        "a value that JSON cannot say",
        f"column {name!r} is {type(value).__name__} {str(value)[:40]!r}: write it as text",
    )
