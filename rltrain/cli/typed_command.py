"""The command that a person typed, to be shown and to be typed again."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

CONSOLE_SCRIPT = "rltrain"


def program(
    arguments: Sequence[str],
    process: Sequence[str] = sys.orig_argv,
    which: Callable[[str], str | None] = shutil.which,
) -> list[str]:
    """What was typed before ``arguments`` of ``rltrain train``.

    Args:
        process: the words with which Python was started
        which: finds a program in PATH
    """
    before = list(process[: len(process) - len(arguments)])
    if list(process[len(before) :]) != list(arguments) or len(before) < 2:
        return [CONSOLE_SCRIPT, "train"]
    if before[-3:-1] in (["-m", "rltrain.cli.app"],) or before[-2:] == ["-m", "rltrain.main"]:
        return before
    script, command = before[-2:]
    if Path(script).name != CONSOLE_SCRIPT or command != "train":  # a test runner, a notebook
        return [CONSOLE_SCRIPT, "train"]
    is_in_path = (found := which(CONSOLE_SCRIPT)) and Path(found).samefile(script)
    return [CONSOLE_SCRIPT if is_in_path else script, command]
