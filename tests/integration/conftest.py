"""Whole runs, each in processes of its own as a user starts them, and as small as runs can be."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltrain.tracking.jsonl import read_jsonl
from tests.tiny_run import SIZES, WARM_START

ROOT = Path(__file__).parents[2]
SMALL = (
    *SIZES,
    "data.size=200",
    "data.eval_size=32",
    "trainer.prompts_per_step=8",
    "tracking.backends=[]",
)
OF_RL = (
    "algorithm.group_size=4",
    *WARM_START,
)
"""What supervised runs have no use for, and so refuse."""
LIMIT_S = 540.0
REMOVED_S = 60.0
"""Until the guardian of a run that was killed has removed what is left; machines are busy."""


@dataclass(frozen=True)
class Run:
    """A run that was started; ``wait`` before looking at what it left."""

    folder: Path
    process: subprocess.Popen[str]
    log: Path

    def wait(self, expect: int = 0) -> "Run":
        status = self.process.wait(LIMIT_S)
        assert status == expect, f"exit status {status}, expected {expect}:\n{self.output}"
        return self

    @property
    def output(self) -> str:
        """What the terminal shows."""
        return self.log.read_text()

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """The rows of metrics.jsonl by step."""
        return {row["step"]: row for row in read_jsonl(self.folder / "metrics.jsonl")}

    def actors(self, name: str) -> list[psutil.Process]:
        """The Ray actors of this run alone, by the name of their class."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended meanwhile
                if f"ray::{name}" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def interrupt(self, number: int = signal.SIGINT) -> list[psutil.Process]:
        """Send the signal to all processes of its terminal, as Ctrl-C does; what is running then,
        also what is of no terminal."""
        running = [psutil.Process(self.process.pid)]
        running += running[0].children(recursive=True)
        os.killpg(self.process.pid, number)
        return running

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


Start = Callable[..., Run]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm-started model, made by the first run that wants it."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """TMPDIR of the runs of a test, of which nothing may be left in it. Its path is short."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    end = time.monotonic() + REMOVED_S
    while (left := sorted(folder.rglob("*"))) and time.monotonic() < end:
        time.sleep(0.2)
    assert left == [], "left in TMPDIR"
    folder.rmdir()


@pytest.fixture
def start(tmp_path: Path, cache_dir: Path, temporary: Path) -> Iterator[Start]:
    """Start a run in the folder ``name``; a second one of that name goes on in it.

    With ``typed`` it starts that command, with the overrides after it.
    """
    runs = []

    def start_run(
        name: str, *overrides: str, recipe: str = "grpo_moe_r3", typed: Sequence[str] = ()
    ) -> Run:
        folder = tmp_path / name
        command = [sys.executable, "-m", "rltrain.main", f"+recipe={recipe}", *SMALL]
        command += () if recipe.startswith("sft") else OF_RL
        command += [f"model.cache_dir={cache_dir}", f"trainer.output_dir={folder}", *overrides]
        command = [*typed, *overrides] if typed else command
        log = tmp_path / f"{name}.{len(runs)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
                env=os.environ
                | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(temporary)},
                text=True,
                start_new_session=True,
            )
        runs.append(Run(folder, process, log))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill()
