"""What is shown of a run without a live panel: one line per step, and how a model is written."""

import logging
import time
from collections.abc import Mapping
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from rltrain.tracking.eta import Eta, duration

logger = logging.getLogger(__name__)

# The metric, what it is called on the line, and how its value is written.
KEY_NUMBERS = (
    ("sft/loss", "loss", "{:.3f}"),
    ("eval/loss", "held-out loss", "{:.3f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("eval/accuracy", "accuracy", "{:.1%}"),
    ("eval/reward_mean", "evaluation reward", "{:.3f}"),
    ("routing/coverage", "coverage", "{:.4g}"),
    ("mismatch/k3", "k3", "{:.1e}"),
    ("time/step", "", "{:.1f} s/step"),
)
LINE_EVERY_S = 10.0


class RunProgress(Protocol):
    """What a person sees of a run while it lasts."""

    def begin_after(self, step: int) -> None:
        """The run was resumed from the checkpoint of this step."""

    def phase(self, name: str | None) -> None:
        """What is done from now on; None: nothing that has a name."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps count from 1, so ``step`` steps are done; 0 is before the first step."""

    def close(self) -> None: ...


class ProgressLines:
    """A log line per step, for a file or a pipe."""

    def __init__(self, num_steps: int, eta: Eta | None = None) -> None:
        self._num_steps, self._eta = num_steps, eta or Eta(num_steps)

    def begin_after(self, step: int) -> None:
        pass

    def phase(self, name: str | None) -> None:
        self._eta.phase(name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self._eta.step(step)
        of = f"of {self._num_steps}{'' if left is None else f', {left} left'}"
        logger.info("step %s  %s  (%s)", step, key_numbers(metrics), of)

    def close(self) -> None:
        pass


class TransferBar:
    """How much of a model is written, how fast, and how long it takes: a bar on a terminal, and
    elsewhere a line every ``LINE_EVERY_S`` seconds.

    Args:
        total: elements of the model
    """

    def __init__(self, label: str, total: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._label, self._total = label, total
        self._done = self._bytes = 0
        self._start = self._shown = time.monotonic()
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn(label), BarColumn(), TaskProgressColumn())
            shown = TextColumn("{task.description}")
            self._bar = Progress(*columns, shown, console=self.console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def advance(self, elements: int, nbytes: int) -> None:
        self._done += elements
        self._bytes += nbytes
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self._numbers(now))
        elif now - self._shown >= LINE_EVERY_S:
            self._shown = now
            self._print(f"{self._label} {self._done / self._total:.0%}  {self._numbers(now)}")

    def _numbers(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        numbers = f"{self._bytes / 1e9:.2f} GB  {self._bytes / 1e6 / seconds:,.0f} MB/s"
        if self._done == 0 or self._done >= self._total:
            return numbers
        left = (self._total - self._done) * seconds / self._done
        return f"{numbers}  {duration(left)} left"

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            now = time.monotonic()
            self._print(f"{self._label}  {self._numbers(now)}  {duration(now - self._start)}")


def key_numbers(metrics: Mapping[str, float]) -> str:
    shown = (
        f"{label} {form.format(metrics[name])}".strip()
        for name, label, form in KEY_NUMBERS
        if name in metrics
    )
    return "  ".join(shown)
