"""Report about a source of problems, for the log and for ``rltrain data``."""

from dataclasses import dataclass, field
from typing import Literal

Use = Literal["prompt", "answer", "tools", "column"]


@dataclass(frozen=True)
class Column:
    """One column, by the name that ``data.answer_column`` and its like take."""

    name: str
    kinds: tuple[str, ...]
    """Kinds of its values in the first rows: text, messages, integer, null, ..."""
    use: Use
    """``column``: the reward function gets it under its name."""


@dataclass(frozen=True)
class Dropped:
    """Rows that were left out for one reason."""

    count: int
    first: str
    """The place of the first such row, and its error."""


@dataclass(frozen=True)
class SourceReport:
    """Counts of the rows of one file, folder or generated set.

    ``rows`` is the sum of ``kept``, ``repeats`` and the counts in ``dropped``.
    """

    where: str
    rows: int
    kept: int
    repeats: int = 0
    """Rows with the same prompt and answer as an earlier row, which is kept."""
    other_columns: dict[str, int] = field(default_factory=dict)
    """Column -> number of repeats in which it differs from the row that is kept."""
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By reason, e.g. ``the prompt is too long``."""
    columns: tuple[Column, ...] = ()
    from_cache: bool = False
