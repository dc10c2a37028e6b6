"""The one temporary folder of a run on this machine; what is in it lasts as long as the run.

    TMPDIR/rl3k9x/    only for this user
        r/            Ray's: its session, with sockets, logs and spilled objects
        t/            TMPDIR of this process, and of all that it starts

The names are short, since the path of a Unix socket has at most 107 bytes, and Ray's own names
below ``r`` take 64 of them. `rltrain.actors.guardian` removes the folder.

What torch compiles is kept for the next run, in `COMPILED`, unless ``TORCHINDUCTOR_CACHE_DIR`` says
where; vLLM's and Triton's caches are in the home folder by themselves.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import choice
from typing import NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TRIES = 100
COMPILED = "~/.cache/rltrain/inductor"
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_ROOT = re.compile(rf"/(rl[{LETTERS}]{{4}})/t$")


class RunTemp(NamedTuple):
    root: Path

    @property
    def ray(self) -> Path:
        return self.root / "r"

    @property
    def files(self) -> Path:
        return self.root / "t"


def temporary_parent() -> Path:
    """Where runs make their folders: ``RAY_TMPDIR``, or else ``TMPDIR``."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


def make_run_temp() -> RunTemp:
    """
    Raises:
        OSError: the folder cannot be made.
    """
    parent = temporary_parent().absolute()
    for _ in range(TRIES):
        temp = RunTemp(parent / f"rl{''.join(choice(LETTERS) for _ in range(4))}")
        try:
            temp.root.mkdir(mode=0o700)
        except FileExistsError:  # another run's
            continue
        temp.files.mkdir(mode=0o700)
        return temp
    raise FileExistsError(f"{parent} is full of folders of runs: remove old ones (rl*)")


def own_token() -> str | None:
    """The name of the folder of the run that this process belongs to, if it has one here."""
    found = _ROOT.search(os.environ.get("TMPDIR", ""))
    return found[1] if found else None


def keep_compiled() -> None:
    """Have torch keep what it compiles in `COMPILED`. When it is imported, it makes a folder of its
    own below TMPDIR, and writes that into the environment."""
    chosen = os.environ.get(INDUCTOR)
    if chosen and not chosen.startswith(f"{tempfile.gettempdir()}/torchinductor_"):
        return
    compiled = Path(COMPILED).expanduser()
    with suppress(OSError):  # without a home, each run compiles for itself
        compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ[INDUCTOR] = str(compiled)


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Within, temporary files of this process, and of those that it starts, are made there."""
    keep_compiled()
    before, found = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield
    finally:
        tempfile.tempdir = found
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
