"""Runs the commands of a tutorial page, and compares what they print with what the page shows.

``bash`` blocks are commands, in order, in one shell. A ``text`` block behind one is its expected
output: every line of it is in the output, in that order; numbers may differ. ``<!-- slow -->``
before a block marks commands that take minutes. ``shell`` blocks need GPUs and are not run.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorial").glob("0*.md"))
MARK = "### block "
HOME = "/home/you"
"""What a page writes for the folder in which the tutorial is followed."""


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    is_slow: bool


def blocks(page: Path) -> list[Block]:
    fence = re.compile(r"^(<!-- slow -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(kind, text, bool(slow)) for slow, kind, text in fence.findall(page.read_text())]


def run_page(page: Path, folder: Path, *, slow: bool) -> None:
    """Run the commands of a page in ``folder``; those that take minutes only if ``slow``.

    Raises:
        AssertionError: a command failed, or printed something else than the page shows.
    """
    in_order = blocks(page)
    commands = [
        (n, block)
        for n, block in enumerate(in_order)
        if block.kind == "bash" and (slow or not block.is_slow)
    ]
    script = "set -euo pipefail\n" + "".join(
        f"echo; echo '{MARK}{n}'\n{block.text}" for n, block in commands
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-6000:]}"
    printed = dict(re.findall(rf"^{MARK}(\d+)\n(.*?)(?=^{MARK}|\Z)", done.stdout, re.M | re.S))
    for n, _ in commands:
        after = in_order[n + 1 :]
        if after and after[0].kind == "text":
            check_output(after[0].text, printed[str(n)].replace(str(folder), HOME))


def check_output(expected: str, printed: str) -> None:
    lines = iter(masked(printed))
    for line in masked(expected):
        assert any(line in other for other in lines), (
            f"expected a line like\n  {line}\nafter those before it, found\n{printed[-6000:]}"
        )


def masked(text: str) -> list[str]:
    """The lines without their numbers, colours and indentation."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def environment(folder: Path) -> dict[str, str]:
    """A PATH on which ``rltrain`` is this source tree's."""
    programs = folder.parent / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / "rltrain"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m rltrain.cli.app "$@"\n')
    program.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
