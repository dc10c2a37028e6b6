"""A run in processes of its own, as a user starts it, and how it is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rltrain.tracking.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
LIMIT_S = 1200.0
CHILDREN_S = 90.0
"""How long what a killed driver leaves may take to end."""


class WholeRun:
    """A run that goes on in ``folder``, or begins there; ``work`` has its reward and its logs."""

    def __init__(self, work: Path, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder
        number = len(list(work.glob(f"{folder.name}.*.log")))
        self.log = work / f"{folder.name}.{number}.log"
        command = [sys.executable, "-m", "rltrain.main", *overrides]
        command += [f"model.cache_dir={work / 'models'}", f"trainer.output_dir={folder}"]
        path = os.pathsep.join([str(work), str(ROOT)])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=work,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )

    def wait(self) -> "WholeRun":
        try:
            status = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        assert status == 0, f"exit status {status}:\n{self.output}"
        return self

    def wait_for(self, text: str) -> None:
        """Until the terminal shows it."""
        until = time.monotonic() + LIMIT_S
        while text not in self.output:
            assert self.process.poll() is None, f"it ended without {text!r}:\n{self.output}"
            assert time.monotonic() < until, f"no {text!r}:\n{self.output}"
            time.sleep(0.02)

    def kill_in_step(self, step: int) -> None:
        """SIGKILL of the driver alone, once all of the step before is on disk; then everything of
        the run ends by itself."""
        until = time.monotonic() + LIMIT_S
        self.wait_for(f"INFO step {step - 1} ")  # its row may be of an earlier start
        while step - 1 not in self.steps:
            assert self.process.poll() is None, f"it ended before step {step}:\n{self.output}"
            assert time.monotonic() < until, f"no step {step - 1}:\n{self.output}"
            time.sleep(0.02)
        children = psutil.Process(self.process.pid).children(recursive=True)
        assert children, "a run has processes"
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(children, CHILDREN_S)
        assert not alive, f"left behind: {[(p.pid, p.name()) for p in alive]}"
        assert self.steps[-1] == step - 1, f"step {step} was over when it was killed"

    @property
    def steps(self) -> list[int]:
        """Those that have a row of metrics, in order."""
        return [row["step"] for row in read_jsonl(self.folder / "metrics.jsonl")]

    @property
    def output(self) -> str:
        """What the terminal shows."""
        return self.log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def cut(folder: Path, step: int, *, rows_to: int) -> None:
    """Leave what a run had on disk after the checkpoint of ``step``."""
    for path in (folder / "checkpoints").iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.name > f"step_{step:06d}":
            shutil.rmtree(path)
    # A row of metrics is the last of its step's lines, so those of the others are there.
    for name, last in (("metrics", rows_to), ("rollouts", step), ("samples", step)):
        rows = read_jsonl(folder / f"{name}.jsonl")
        text = "".join(f"{json.dumps(row)}\n" for row in rows if row["step"] <= last)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "outcome.json").unlink(missing_ok=True)
