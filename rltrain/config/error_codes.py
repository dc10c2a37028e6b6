"""Codes of error messages, such as RL1001, and their entries in docs/troubleshooting.md.

A message that a user can act on ends in `` [RL1001]``. ``rltrain explain RL1001`` shows the entry.
"""

import errno
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

PAGE = "troubleshooting.md"
PARTS = ("You see", "Why", "What to do", "How to check")
"""What every entry says, in this order."""
_CODE = re.compile(r"\[(RL\d{4})\]")
_HEADING = re.compile(r"^### (?:(RL\d{4}): )?(.+)$", re.MULTILINE)
_DISK = {
    errno.ENOSPC: "RL6005",
    errno.EDQUOT: "RL6005",
    errno.EACCES: "RL6001",
    errno.EROFS: "RL6001",
    errno.ENAMETOOLONG: "RL6001",
}


class Entry(NamedTuple):
    code: str
    """Empty for a symptom without an error message."""
    title: str
    text: str
    """Its parts, as Markdown."""


def codes_in(text: str) -> list[str]:
    """The codes of a message, each once, in their order."""
    return list(dict.fromkeys(_CODE.findall(text)))


def with_code(message: str, code: str) -> str:
    """``message`` with ``code`` at its end, or the more special one that it has already."""
    codes = codes_in(message)
    if len(codes) > 1:  # a line each
        return message
    kept = codes[0] if codes else code
    return f"{message.replace(f' [{kept}]', '')} [{kept}]"


def coded(error: BaseException, text: str) -> str:
    """The text of an error that ended a command; one that has no code gets that of its kind."""
    if isinstance(error, OSError) and error.errno in _DISK:
        return with_code(text, _DISK[error.errno])
    if isinstance(error, ValueError | RuntimeError | OSError | KeyboardInterrupt):
        return text
    return with_code(text, "RL7007")


def help_line(text: str) -> str:
    """The line below a message that leads to its entries; empty for a message without a code."""
    codes = codes_in(text)
    return f"help: rltrain explain {' '.join(codes)}\n" if codes else ""


@cache
def entries() -> tuple[Entry, ...]:
    """The entries of the page, in its order."""
    text = _page().read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    return tuple(
        Entry(heading[1] or "", heading[2], text[heading.end() : end].partition("\n## ")[0].strip())
        for heading, end in zip(headings, ends, strict=True)
    )


def explain(codes: Sequence[str]) -> str:
    """The entries of these codes, as text for a terminal; without codes a list of all titles.

    Raises:
        ValueError: there is no such code.
    """
    by_code = {entry.code: entry for entry in entries() if entry.code}
    if not codes:
        return "".join(f"{entry.code:<7} {entry.title}\n" for entry in entries())
    wanted = [code.strip("[]").upper() for code in codes]
    if unknown := [code for code in wanted if code not in by_code]:
        raise ValueError(
            f"{unknown[0]}: there is no such code. `rltrain explain` lists all; they go from "
            f"{min(by_code)} to {max(by_code)}"
        )
    return "\n".join(_plain(by_code[code]) for code in wanted)


def _plain(entry: Entry) -> str:
    text = entry.text.replace("**", "").replace("`", "")
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r"\1 (\2)", text)
    return f"{entry.code}: {entry.title}\n\n{text}\n"


def _page() -> Path:
    """``docs/`` of the installed package, or of the source checkout around it."""
    package = Path(__file__).parents[1]
    for folder in (package / "docs", package.parent / "docs"):
        if (folder / PAGE).is_file():
            return folder / PAGE
    raise ValueError(f"expected {PAGE} in {package}/docs or beside it: install rltrain again")
