"""``rltrain compare``: several runs against the first, in the terminal and as one page."""

import sys
from collections.abc import Sequence
from pathlib import Path


def compare(folders: Sequence[Path], output: Path = Path("compare.html")) -> int:
    """Write the page ``output`` about these runs and print a short table.

    Raises:
        ValueError: fewer than two folders, the same one twice, one that holds no run, or no folder
            for the page.
    """
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: expected a file in a folder that exists [RL6001]")
    from rich.console import Console

    from rltrain.tracking.report.compare import (
        compare_runs,
        config_differences,
        last_numbers,
        notes_of,
    )
    from rltrain.tracking.report.compare_page import write_comparison

    path, runs = write_comparison(folders, output)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(_table([last_numbers(run) for run in runs]))
    rows = [
        {
            "quantity": one.quantity,
            "run": one.run,
            f"against {runs[0].label}": one.value,
            "95 % interval": one.interval,
            "verdict": one.verdict,
        }
        for one in compare_runs(runs)
    ]
    if rows:
        console.print(_table(rows))
    changes = config_differences(runs)
    if changes:
        console.print(f"\ndiffer in: {', '.join(changes)}", markup=False)
    for note in notes_of(runs, changes):
        console.print(note, markup=False)
    console.print(str(path.absolute()), markup=False, soft_wrap=True)
    return 0


def _table(rows: Sequence[dict[str, str]]) -> object:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(Text(name))
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))
    return table
