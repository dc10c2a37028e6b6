"""Results of broken runs, on disk and as a table."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.chaos.chain import Chain, Row

BEGIN, END = "<!-- faults: written by python -m tests.chaos -->", "<!-- end of faults -->"
HEAD = (
    "| fault | phase | what was said | seconds until the step was done | finished steps lost "
    "| left behind | same bits |",
    "|---|---|---|---|---|---|---|",
)
LONGEST = 150


def keep(folder: Path, name: str, chain: Chain) -> None:
    """Keep the rows of a chain, and the output of its runs."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / re.sub("[^a-zA-Z0-9]+", "-", name).lower()
    text = json.dumps([asdict(row) for row in chain.rows], indent=1)
    file.with_suffix(".json").write_text(text + "\n")
    shutil.copy(chain.log, file.with_suffix(".log"))


def read(folder: Path) -> list[Row]:
    return [
        Row(**row) for file in sorted(folder.glob("*.json")) for row in json.loads(file.read_text())
    ]


def write_table(page: Path, results: Path) -> None:
    """Put what was found between the marks of a page.

    Raises:
        ValueError: the page has no marks.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected {BEGIN} and {END}")
    page.write_text("\n".join([f"{before}{BEGIN}", "", *table(read(results)), "", f"{END}{after}"]))


def table(rows: Sequence[Row]) -> list[str]:
    return [*HEAD, *(f"| {' | '.join(_cells(row))} |" for row in rows)]


def _cells(row: Row) -> list[str]:
    ended = f"exit status {row.ended}, then resumed: " if row.ended else ""
    said = without_details(row.said)
    return [
        row.fault,
        row.phase,
        f"{ended}{said[:LONGEST]}{'…' if len(said) > LONGEST else ''}" or "nothing",
        "" if row.seconds is None else f"{row.seconds:.0f}",
        "" if row.steps_lost is None else str(row.steps_lost),
        ", ".join(row.left) or "nothing",
        {True: "yes", False: "**no**", None: "not compared"}[row.bitwise],
    ]


def without_details(text: str) -> str:
    """Without what differs from run to run, and what a table cannot hold."""
    text = re.sub(r"process \d+", "process N", text)
    text = re.sub(r"/tmp/\S+/", ".../", text)
    return text.replace("|", "\\|").replace("\n", " ")
