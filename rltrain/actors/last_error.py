"""The error that a process died of, found in what it wrote. Pure.

A log has terminal codes, prefixes of vLLM's processes and loggers, frames of Ray's, errors that
were handled, and after the error that counts those that follow from it.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from rltrain.config.redact import strip_terminal_codes

LONGEST = 12
"""Lines of an error's text."""
_PREFIX = re.compile(
    r"^(?:\((?:EngineCore|Worker|APIServer)[^)]*pid=\d+\) ?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\S+ )?\[[^\]]+:\d+\] ?)?"
)
"""Of vLLM's processes and of its loggers."""
_TIME = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d|\s")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)')
_FINAL = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
_START = "Traceback (most recent call last):"
_BETWEEN = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_FOLLOWS = (
    "see root cause above",
    "see stack trace for root cause",
    "see stack trace (above)",
    "engine core initialization failed",
    "enginedeaderror",
    "workerproc initialization failed",
    "connection reset by peer",
    "connection closed by peer",
    "broken pipe",
    "keyboardinterrupt",
    "systemexit",
    "cancellederror",
)
"""What a process says when another one failed."""
_FATAL = re.compile(
    r"^(?:Fatal Python error: |terminate called after |\*\*\* SIG[A-Z]+ received"
    r"|!+ (?:Segfault|Bus error).* encountered|.*error while loading shared libraries: "
    r"|.*double free or corruption|malloc\(\): |free\(\): |corrupted (?:size|double))"
)
"""What the interpreter, Ray, torch or the C library says when a signal ends a process."""
_LOGGED = re.compile(
    r"^(?:\[?[A-Z]?\d{4}[- ]?\d\d|\d{4}-\d\d-\d\d|\[rank\d|\[[WE]\d{4}|/\S+\.py:\d+: |:\w+:)"
)
"""A line of another logger, which no error goes on in."""
_SITE = re.compile(r".*/(?:site-packages|dist-packages|lib/python\d\.\d+)/")
_RAY = re.compile("/site-packages/ray/|^python/ray/")


class LastError(NamedTuple):
    text: str
    """``ValueError: ...``, as the process wrote it."""
    where: str
    """The deepest frame, ``vllm/config/model.py:57 in verify``; "" where none is known."""

    def __str__(self) -> str:
        return f"{self.text} (at {self.where})" if self.where else self.text


class _Line(NamedTuple):
    source: str
    """Which process and logger wrote it, as far as it says so."""
    text: str


def last_error(log: str, within: int | None = None) -> LastError | None:
    """The last error that does not follow from another process's; None where there is none.

    Args:
        within: an error with more lines than that behind it was not the end of the process
    """
    lines = _bare(log)
    if fatal := _fatal(lines):
        return fatal
    own = [
        error
        for number, error in _tracebacks(lines)
        if not _follows(error.text) and (within is None or _said(lines[number + 1 :]) <= within)
    ]
    return own[-1] if own else None


def last_line(log: str) -> str:
    """What the process said last; "" where it said nothing."""
    texts = (line.text.strip() for line in _bare(log))
    said = [text for text in texts if text and not text.startswith((":job_id", ":actor_name"))]
    return said[-1] if said else ""


def strip_ray_frames(trace: str) -> str:
    """A traceback without terminal codes and without the frames of Ray's own files."""
    kept: list[str] = []
    skipping = False
    for line in strip_terminal_codes(trace).split("\n"):
        if frame := _FRAME.match(line):
            skipping = bool(_RAY.search(frame["file"]))
        elif not line.startswith("    "):
            skipping = False
        # Marks below a line of source, where Ray took that line away.
        lost = line.strip() and not line.strip(" ^~") and not _is_source(kept)
        if not skipping and not lost:
            kept.append(line)
    return "\n".join(kept)


def _is_source(lines: Sequence[str]) -> bool:
    return bool(lines) and lines[-1].startswith("    ") and not _FRAME.match(lines[-1])


def _bare(log: str) -> list[_Line]:
    """Lines without what processes and loggers put before them."""
    lines = []
    for line in strip_terminal_codes(log).split("\n"):
        start = _PREFIX.match(line)
        cut = start.end() if start else 0
        lines.append(_Line(_TIME.sub("", line[:cut]), line[cut:]))
    return lines


def _tracebacks(lines: Sequence[_Line]) -> list[tuple[int, LastError]]:
    """The error at the end of each and its line; one that led to another stands as its cause."""
    found: list[tuple[int, LastError]] = []
    inside: dict[str, str] = {}  # by source, the last frame: what processes write interleaves
    chained = set()
    for number, (source, text) in enumerate(lines):
        if text.lstrip().startswith(_START):
            inside[source] = ""
        elif text.startswith(_BETWEEN):
            chained.add(source)
        elif source in inside and (frame := _FRAME.match(text)):
            inside[source] = _place(frame)
        elif source in inside and _FINAL.match(text):
            error = LastError(_whole(lines, number), inside.pop(source))
            if source in chained and found:
                error = LastError(f"{error.text} (after {found.pop()[1].text})", error.where)
            chained.discard(source)
            found.append((number, error))
    return found


def _whole(lines: Sequence[_Line], number: int) -> str:
    """An error's text, which may go on for some lines of the same source."""
    source, text = lines[number]
    words = [text]
    for other, line in lines[number + 1 : number + LONGEST]:
        if other == source:
            if not line.strip() or line.lstrip().startswith((_START, "===")) or _LOGGED.match(line):
                break
            words.append(line.strip())
    return " ".join(words)


def _fatal(lines: Sequence[_Line]) -> LastError | None:
    start = next((n for n, line in enumerate(lines) if _FATAL.match(line.text)), None)
    if start is None:
        return None
    text, where, stack = lines[start].text, "", False
    for _, line in lines[start + 1 :]:
        if line.startswith("Fatal Python error"):  # Ray's own words came first
            text = line
        if line.strip().startswith("what():"):
            text = f"{text} {line.strip()}"
        stack = bool(line) and (stack or line.endswith("(most recent call first):"))
        if stack and not where and (frame := _FRAME.match(line)):
            where = _place(frame)
    return LastError(text.strip("*! "), where)


def _follows(text: str) -> bool:
    return any(sign in text.lower() for sign in _FOLLOWS)


def _said(lines: Sequence[_Line]) -> int:
    return sum(bool(line.text.strip()) for line in lines)


def _place(frame: re.Match[str]) -> str:
    return f"{_SITE.sub('', frame['file'])}:{frame['line']} in {frame['name']}"
