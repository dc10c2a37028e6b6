"""Rows that cannot be used: their errors and counts."""

from rltrain.config.error_codes import with_code
from rltrain.data.source_report import Dropped


class BadRow(ValueError):
    """A row cannot be used.

    Rows are counted by ``reason``. The message adds the details of this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Tally:
    """Counts the rows left out of a source, by reason, and keeps the first row of each reason.

    A row that cannot be used ends the run unless ``drop`` is true.
    """

    def __init__(self, drop: bool) -> None:
        self.drop = drop
        self.dropped: dict[str, Dropped] = {}

    def bad(self, where: str, error: BadRow, number: int = 1) -> None:
        """Count rows that cannot be used, of which the first is at ``where``.

        Raises:
            ValueError: such rows must not be left out; the message names ``where``.
        """
        message = f"{where}: {error}"
        if not self.drop:
            advice = "data.on_bad_row=drop leaves out rows that cannot be used"
            raise ValueError(with_code(f"{message} ({advice})", "RL2004")) from error
        self.count(error.reason, message, number)

    def count(self, reason: str, message: str, number: int = 1) -> None:
        before = self.dropped.get(reason, Dropped(0, message))
        self.dropped[reason] = Dropped(before.count + number, before.first)

    @property
    def total(self) -> int:
        return sum(dropped.count for dropped in self.dropped.values())

    def check_some_left(self, source: str, num_rows: int) -> None:
        """Raises ValueError when all of ``num_rows`` rows were left out."""
        if self.total == num_rows:
            most = max(self.dropped.values(), key=lambda dropped: dropped.count)
            message = (
                f"{source}: none of the {num_rows} rows can be used, {most.count} of them for this "
                f"reason: {most.first}"
            )
            raise ValueError(with_code(message, "RL2004"))
