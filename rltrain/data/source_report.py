"""What was found in a source of problems: for the log and for ``rltrain data``."""

from dataclasses import dataclass, field
from typing import Literal

Use = Literal["prompt", "answer", "tools", "column"]


@dataclass(frozen=True)
class Column:
    """One column, by the name that ``data.answer_column`` and its like take."""

    name: str
    kinds: tuple[str, ...]
    """What its values are: text, messages, integer, null, ... in the first rows."""
    use: Use
    """``column``: it reaches the reward function under its name."""


@dataclass(frozen=True)
class Dropped:
    """Rows that were left out for one reason."""

    count: int
    first: str
    """The first such row: where it is and what is wrong with it."""


@dataclass(frozen=True)
class SourceReport:
    """What became of the rows of one file, folder or generated set.

    ``rows`` is ``kept`` and ``repeats`` and all that was dropped.
    """

    where: str
    rows: int
    kept: int
    repeats: int = 0
    """Rows with the prompt and answer of an earlier one, which is kept."""
    other_columns: dict[str, int] = field(default_factory=dict)
    """Columns in which repeats differ from the row that is kept, and in how many."""
    dropped: dict[str, Dropped] = field(default_factory=dict)
    """By reason, e.g. ``the prompt is too long``."""
    columns: tuple[Column, ...] = ()
    from_cache: bool = False
