"""Finds the error that ended a process in its log. Pure.

A log also has terminal codes, prefixes of vLLM's processes and loggers, frames of Ray, errors that
were handled, and errors that follow from the one that counts.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from rltrain.config.redact import strip_terminal_codes

LONGEST = 12
"""The most lines that an error's text has."""
_PREFIX = re.compile(
    r"^(?:\((?:EngineCore|Worker|APIServer)[^)]*pid=\d+\) ?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (?:\S+ )?\[[^\]]+:\d+\] ?)?"
)
"""What vLLM's processes and loggers write before a line."""
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
"""Signs of an error that follows from the failure of another process."""
_FATAL = re.compile(
    r"^(?:Fatal Python error: |terminate called after |\*\*\* SIG[A-Z]+ received"
    r"|!+ (?:Segfault|Bus error).* encountered|.*error while loading shared libraries: "
    r"|.*double free or corruption|malloc\(\): |free\(\): |corrupted (?:size|double))"
)
"""What the interpreter, Ray, torch or the C library writes when a signal ends a process."""
_LOGGED = re.compile(
    r"^(?:\[?[A-Z]?\d{4}[- ]?\d\d|\d{4}-\d\d-\d\d|\[rank\d|\[[WE]\d{4}|/\S+\.py:\d+: |:\w+:)"
)
"""A line of another logger, which ends the text of an error."""
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
    """The process and logger that wrote it, by its prefix."""
    text: str


def last_error(log: str, within: int | None = None) -> LastError | None:
    """The last error that does not follow from another process's error, or None.

    Args:
        within: an error that more than this many lines follow did not end the process
    """
    lines = _bare(log)
    if fatal := _fatal(lines):
        return fatal
    causes = [
        error
        for number, error in _tracebacks(lines)
        if not _follows(error.text) and (within is None or _said(lines[number + 1 :]) <= within)
    ]
    return causes[-1] if causes else None


def last_line(log: str) -> str:
    """The last line that the process wrote; "" if it wrote none."""
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
        # Ray may remove a line of source and leave the marks below it.
        orphaned = line.strip() and not line.strip(" ^~") and not _is_source(kept)
        if not skipping and not orphaned:
            kept.append(line)
    return "\n".join(kept)


def _is_source(lines: Sequence[str]) -> bool:
    return bool(lines) and lines[-1].startswith("    ") and not _FRAME.match(lines[-1])


def _bare(log: str) -> list[_Line]:
    """The lines, split into the prefix of process and logger and the text."""
    lines = []
    for line in strip_terminal_codes(log).split("\n"):
        start = _PREFIX.match(line)
        cut = start.end() if start else 0
        lines.append(_Line(_TIME.sub("", line[:cut]), line[cut:]))
    return lines


def _tracebacks(lines: Sequence[_Line]) -> list[tuple[int, LastError]]:
    """The error at the end of each traceback, and its line number. A chain is one error."""
    errors: list[tuple[int, LastError]] = []
    inside: dict[str, str] = {}  # by source, since lines interleave: the last frame
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
            if source in chained and errors:
                error = LastError(f"{error.text} (after {errors.pop()[1].text})", error.where)
            chained.discard(source)
            errors.append((number, error))
    return errors


def _whole(lines: Sequence[_Line], number: int) -> str:
    """An error's text, which may continue on later lines of the same source."""
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
        if line.startswith("Fatal Python error"):  # after a line of Ray's
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
