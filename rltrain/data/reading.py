"""Reads, checks and counts all rows of a source. Rows with equal prompt and answer are one
entry."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rltrain.config.data import DataConfig
from rltrain.data.answers import AnswerRule
from rltrain.data.bad_rows import BadRow, Tally
from rltrain.data.columns import kind_of, leaves
from rltrain.data.examples import Example, read_example
from rltrain.data.json_rows import SameAs
from rltrain.data.source_report import Column, Use
from rltrain.data.sources import SourceRow

logger = logging.getLogger(__name__)

NUM_LOOKED_AT = 100
"""Rows whose columns are reported."""

LOG_EVERY_S = 10.0


@dataclass
class DistinctExample:
    """Rows with equal prompt and answer: the first of them, and their number."""

    example: Example
    asked: bytes
    """A digest of the prompt and its tools."""
    answered: bytes
    """A digest of the answer; without an answer column, of all columns."""
    count: int = 1
    other_columns: Counter[str] = field(default_factory=Counter)
    """Column -> number of rows in which it differs from that of the first row."""

    def add(self, example: Example) -> None:
        self.count += 1
        if example.columns != self.example.columns:
            ours, theirs = self.example.columns, example.columns
            self.other_columns.update(
                name for name in ours | theirs if ours.get(name) != theirs.get(name)
            )


@dataclass
class Reading:
    """The rows of a source while they are read. Unusable rows are counted in ``tally``."""

    config: DataConfig
    rule: AnswerRule
    tally: Tally
    where: str
    num_rows: int = 0
    entries: dict[tuple[bytes, bytes], DistinctExample] = field(default_factory=dict)
    kinds: dict[str, dict[str, None]] = field(default_factory=dict)

    def read(self, rows: Iterable[SourceRow]) -> None:
        """Read all rows.

        Raises:
            ValueError: a row cannot be used and must not be left out, or there are no rows.
        """
        outcomes: list[DistinctExample | BadRow] = []  # of the rows of one file
        due = time.monotonic() + LOG_EVERY_S
        for at in rows:
            if at.number == 0:
                outcomes = []
            self.num_rows += 1
            if isinstance(at.row, SameAs):
                outcome = outcomes[at.row.number]
                if isinstance(outcome, DistinctExample):
                    outcome.count += 1
            else:
                outcome = self._outcome(at.row, at)
            if isinstance(outcome, BadRow):
                self.tally.bad(at.where, outcome)
            outcomes.append(outcome)
            if self.num_rows % 1000 == 0 and time.monotonic() > due:
                due = time.monotonic() + LOG_EVERY_S
                logger.info(
                    "%s: read %d rows, %d different", self.where, self.num_rows, len(self.entries)
                )
        if not self.num_rows:
            raise ValueError(f"{self.where} has no rows: a dataset needs at least one [RL2006]")

    def _outcome(self, row: Mapping[str, Any] | BadRow, at: SourceRow) -> DistinctExample | BadRow:
        if isinstance(row, BadRow):
            return row
        if self.num_rows <= NUM_LOOKED_AT:
            for name, value in leaves(row):
                self.kinds.setdefault(name, {})[kind_of(value)] = None
        try:
            example = read_example(row, self.config, self.rule, at.where)
        except BadRow as error:
            return error
        by_columns = self.config.answer_column is None and self.config.last_turn != "answer"
        key = (example.asked(), example.answered(by_columns))
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = DistinctExample(example, *key)
        else:
            entry.add(example)
        return entry

    def columns(self) -> tuple[Column, ...]:
        """The columns of the first rows and their uses."""
        uses: dict[str | None, Use] = {
            self.config.tools_column: "tools",
            self.config.answer_column: "answer",
            self.config.prompt_column: "prompt",
        }
        return tuple(
            Column(name, tuple(kinds), uses.get(name, "column"))
            for name, kinds in self.kinds.items()
        )
