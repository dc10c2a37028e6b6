"""The live panel of a run in a terminal: phase, step, key numbers, time left, last warnings.

Log lines and lines of steps scroll above it.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rltrain.config.redact import strip_terminal_codes
from rltrain.tracking.eta import Eta, TimeLeft, duration
from rltrain.tracking.progress import key_numbers

PHASES = {
    "start_ray": "starting Ray",
    "warm_start": "warm start of the tiny model",
    "start_engines": "starting engines",
    "load_weights": "loading weights",
    "generate": "generating",
    "reward": "rewards",
    "old_logprobs": "log-probabilities",
    "native_logprobs": "log-probabilities, native routing",
    "ref_logprobs": "log-probabilities, reference model",
    "values": "values",
    "advantages": "advantages",
    "critic_update": "critic update",
    "update": "update",
    "drain": "waiting for the last responses",
    "weight_sync": "weight sync",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
    "engine_sleep": "engines to sleep",
    "engine_wake": "engines waking up",
    "onload": "onloading",
    "offload": "offloading",
}
"""The name of a phase -> what the panel calls it."""
NUM_WARNINGS = 3
STEP_NUMBERS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/accuracy", "{:.1%}"),
    ("loss", "sft/loss", "{:.3f}"),
    ("held-out loss", "eval/loss", "{:.3f}"),
    ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
    ("mismatch k3", "mismatch/k3", "{:.1e}"),
    ("coverage", "routing/coverage", "{:.4g}"),
    ("s/step", "time/step", "{:.1f}"),
)
"""What the panel calls a metric, its name, and how its value is written."""


class LivePanel:
    """Shows a run while it lasts; close it before anything else writes to the terminal."""

    def __init__(self, console: Console, title: str, num_steps: int, eta: Eta) -> None:
        self.console = console
        self._title, self._num_steps, self._eta = title, num_steps, eta
        self._done = 0
        self._phase, self._phase_began = "starting", time.monotonic()
        self._left: tuple[TimeLeft, float] | None = None
        self._numbers: dict[str, float] = {}
        self._warnings: deque[str] = deque(maxlen=NUM_WARNINGS)
        self._closing = ExitStack()
        self._closing.enter_context(
            Live(
                get_renderable=self.render,
                console=console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
        )
        self._closing.enter_context(self._log_lines_above())

    def begin_after(self, step: int) -> None:
        self._done = step

    def phase(self, name: str | None) -> None:
        self._eta.phase(name)
        self._phase, self._phase_began = PHASES.get(name, name) if name else "", time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps count from 1, so ``step`` steps are done; 0 is before the first step."""
        left = self._eta.step(step)
        self._left = None if left is None else (left, time.monotonic())
        self._done = step
        self._numbers |= metrics  # an accuracy stays until the next one
        self.print_line(f"step {step}  {key_numbers(metrics)}")

    def print_line(self, line: str) -> None:
        """Above the panel. A terminal obeys nothing that is in the line."""
        self.console.print(Text(strip_terminal_codes(line)), soft_wrap=True)

    def close(self) -> None:
        self._closing.close()

    def render(self) -> RenderableType:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(self._num_steps, 1), completed=self._done)
        head.add_row(f"step {self._done} of {self._num_steps}", bar, self._time_left())
        rows: list[RenderableType] = [head, self._phase_line()]
        numbers = [
            Text.assemble((f"{label} ", "dim"), form.format(self._numbers[name]))
            for label, name, form in STEP_NUMBERS
            if name in self._numbers
        ]
        if numbers:
            rows.append(Text("   ").join(numbers))
        for warning in self._warnings:
            rows.append(Text(f"! {warning}", "yellow", no_wrap=True, overflow="ellipsis"))
        return Panel(Group(*rows), title=Text(self._title, overflow="ellipsis"), title_align="left")

    def _phase_line(self) -> Text:
        if not self._phase:
            return Text("")
        seconds = duration(time.monotonic() - self._phase_began)
        return Text.assemble((self._phase, "bold"), (f"  {seconds}", "dim"))

    def _time_left(self) -> str:
        if self._left is None:
            return ""
        left, since = self._left
        gone = time.monotonic() - since
        return f"{TimeLeft(max(left.seconds - gone, 0.0), left.at_least)} left"

    @contextmanager
    def _log_lines_above(self) -> Iterator[None]:
        """Log lines that would go to the terminal go above the panel."""
        root = logging.getLogger()
        before = list(root.handlers)
        replaced = [handler for handler in before if _writes_to_terminal(handler)]
        formatter = replaced[0].formatter if replaced else None
        above = _AbovePanel(self, self._warnings)
        above.setFormatter(formatter)
        during = [*(handler for handler in before if handler not in replaced), above]
        root.handlers = list(during)
        try:
            yield
        finally:
            root.handlers = before + [new for new in root.handlers if new not in during]


def _writes_to_terminal(handler: logging.Handler) -> bool:
    """A file handler that has not opened its file yet has no stream."""
    stream = handler.stream if isinstance(handler, logging.StreamHandler) else None
    return stream is not None and stream.isatty()


class _AbovePanel(logging.Handler):
    def __init__(self, panel: LivePanel, warnings: "deque[str]") -> None:
        super().__init__()
        self._panel, self._warnings = panel, warnings

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._warnings.append(strip_terminal_codes(record.getMessage()).partition("\n")[0])
        self._panel.print_line(self.format(record))
