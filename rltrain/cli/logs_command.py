"""``rltrain logs``: the logs of a run's workers and engines, without secrets and without what a
terminal would obey."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltrain.actors.actor_log import node_of_log
from rltrain.actors.last_error import last_error, last_line
from rltrain.cli.find_run import find_run
from rltrain.config.redact import escape_control, redacted_text

ERROR_LOG = "error"
"""The name of error.log: the traceback that ended the run."""
TAIL_BYTES = 64 * 1024
POLL_S = 0.5


def logs(
    words: Sequence[str], *, with_errors: bool, with_new_lines: bool, rank: int | None = None
) -> int:
    """List the logs of a run, print one or follow them.

    Args:
        words: the folder of a run, the name of a log, or both in this order
        with_errors: show the last error of each instead
        with_new_lines: show what is written from now on, until the run is over
        rank: of the policy, or of the role that the name of the log is then; whose log to take

    Raises:
        ValueError: there is no such run or log.
    """
    if with_errors and with_new_lines:
        raise ValueError("expected one of --follow and --errors, found both")
    run, who = split_words(words)
    if rank is not None:
        who = f"{who or 'policy'}-{rank}"
    files = choose(log_files(run), who)
    if with_errors:
        list_errors(files)
    elif with_new_lines:
        follow(files, (run / "outcome.json").exists)
    elif who is None:
        list_logs(files)
    elif len(files) > 1:
        raise ValueError(f"{who}: expected the name of one log, found {', '.join(files)}")
    else:
        print_log(*files.values())
    return 0


def split_words(words: Sequence[str]) -> tuple[Path, str | None]:
    """The folder of the run, and whose log. A single word that is no path is the latter."""
    if len(words) > 2:
        raise ValueError(f"expected RUN and WHO at most, found {len(words)} words")
    if len(words) == 2:
        return find_run(Path(words[0])), words[1]
    if words and (os.sep in words[0] or Path(words[0]).expanduser().is_dir()):
        return find_run(Path(words[0])), None
    return find_run(None), (words[0] if words else None)


def log_files(run: Path) -> dict[str, Path]:
    """Name -> file, e.g. ``engine-0``.

    Raises:
        ValueError: the run has none.
    """
    files = {file.stem: file for file in sorted((run / "logs").glob("*.log"))}
    if (run / "error.log").is_file():
        files[ERROR_LOG] = run / "error.log"
    if not files:
        raise ValueError(
            f"{run}: expected logs in {run / 'logs'}, found none: the run ended before it started "
            "a worker, or its first lines have not come from their node yet"
            " [RL7001]"
        )
    return files


def choose(files: dict[str, Path], who: str | None) -> dict[str, Path]:
    """The files whose names are ``who`` or begin with it; all where it is None.

    Raises:
        ValueError: there is none.
    """
    if who is None:
        return files
    name = who.removesuffix(".log")
    chosen = {n: file for n, file in files.items() if n == name} or {
        n: file for n, file in files.items() if n.startswith(name)
    }
    if not chosen:
        raise ValueError(f"{who}: expected one of {', '.join(files)}")
    return chosen


def list_logs(files: dict[str, Path]) -> None:
    """Their sizes and last lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    nodes = {name: _node(file) for name, file in files.items()}
    table.add_column("log")
    if any(nodes.values()):
        table.add_column("node")
    table.add_column("size", justify="right")
    table.add_column("last line", no_wrap=True, overflow="ellipsis")
    for name, file in files.items():
        size = file.stat().st_size
        node = [nodes[name]] if any(nodes.values()) else []
        last = Text(last_line(_read(file, size - TAIL_BYTES)))
        table.add_row(name, *node, _size(size), last)
    Console(highlight=False).print(table)


def _node(file: Path) -> str:
    """Where the process was that wrote the file, if it was in a cluster."""
    with file.open("rb") as opened:
        head = opened.read(TAIL_BYTES).decode(errors="replace")
    return node_of_log(_read(file, file.stat().st_size - TAIL_BYTES)) or node_of_log(head)


def print_log(file: Path) -> None:
    sys.stdout.write(_read(file))


def list_errors(files: dict[str, Path]) -> None:
    """The last error in each log, where it was raised, and the file."""
    for name, file in files.items():
        error = last_error(_read(file))
        if error is None:
            sys.stdout.write(f"{name}: no error\n")
            continue
        place = f"\n  at {error.where}" if error.where else ""
        text = error.text.replace("\n", "\n  ")
        sys.stdout.write(f"{name}: {text}{place}\n  in {file}\n")


def follow(files: dict[str, Path], is_over: Callable[[], bool]) -> None:
    """Print what is written to the files from now on, until the run is over."""
    for name, text in new_text(files, is_over):
        prefix = f"{name}: " if len(files) > 1 else ""
        for line in text.splitlines():
            sys.stdout.write(f"{prefix}{line}\n")
        sys.stdout.flush()


def new_text(files: dict[str, Path], is_over: Callable[[], bool]) -> Iterator[tuple[str, str]]:
    """Whole lines, as they are written, after the last few of what is there."""
    at = {name: _start_of_tail(file) for name, file in files.items()}
    while True:
        over = is_over()  # asked first: what was written before the end is shown
        for name, file in files.items():
            if file.stat().st_size < at[name]:  # its older half was cut
                at[name] = _start_of_tail(file)
            with file.open("rb") as opened:
                opened.seek(at[name])
                whole, newline, _ = opened.read().rpartition(b"\n")
            at[name] += len(whole + newline)
            if newline:
                yield name, _clean(whole.decode(errors="replace"))
        if over:
            return
        time.sleep(POLL_S)


def _start_of_tail(file: Path, num_lines: int = 10) -> int:
    size = file.stat().st_size
    with file.open("rb") as opened:
        opened.seek(max(size - TAIL_BYTES, 0))
        lines = opened.read().splitlines(keepends=True)
    return size - sum(map(len, lines[-num_lines:]))


def _read(file: Path, start: int = 0) -> str:
    with file.open("rb") as opened:
        opened.seek(max(start, 0))
        return _clean(opened.read().decode(errors="replace"))


def _clean(text: str) -> str:
    # The logs of a run that goes on, or of one on another machine, may have secrets in them yet.
    return escape_control(redacted_text(text))


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
