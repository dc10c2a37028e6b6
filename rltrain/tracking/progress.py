"""What the user sees: one line per step, and a progress bar on a terminal."""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

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
RECENT_STEPS = 20
LINE_EVERY_S = 10.0


class ProgressLine:
    """Shows steps as they are logged; plain log lines if the output is not a terminal."""

    def __init__(self, num_steps: int, first_step: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self._num_steps = num_steps
        self._last: float | None = None
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self.console)
            done = max(first_step - 1, 0)
            self._task = self._bar.add_task("starting", total=num_steps, completed=done)
            self._bar.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps count from 1, so ``step`` steps are done; 0 is before the first step."""
        line, left = f"step {step}  {key_numbers(metrics)}", self._time_left(step)
        if self._bar is None:
            logger.info("%s  (of %s%s)", line, self._num_steps, left and f", {left}")
            return
        self._bar.console.print(line, highlight=False, markup=False)
        self._bar.update(self._task, completed=step, description=left)

    def _time_left(self, step: int) -> str:
        """By the mean of recent steps; empty until two are logged. Start-up is not a step."""
        now = time.monotonic()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now
        if not self._durations:
            return ""
        mean = sum(self._durations) / len(self._durations)
        return f"{duration(max(self._num_steps - step, 0) * mean)} left"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


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


def duration(seconds: float) -> str:
    """``75`` as ``1m15s``; two units at most, the way a person says it."""
    total = round(seconds)
    days, hours, minutes = total // 86400, total // 3600 % 24, total // 60 % 60
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    if minutes:
        return f"{minutes}m{total % 60:02}s"
    return f"{total}s"
