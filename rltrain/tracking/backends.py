"""The trackers beside the run folder: what is asked of each, and what happens when one fails.

The run folder has everything. A tracker gets a copy, so its failure costs the copy alone.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from rltrain.config.trainer import TrackingConfig
from rltrain.parallel.rendezvous import within

logger = logging.getLogger(__name__)

State = Literal["finished", "failed", "interrupted"]
Rows = Sequence[Mapping[str, Any]]
RETRY_S = 60.0
"""Seconds in which a call that failed is not made again: a server that is down must not slow the
steps."""

LIMITS_S = {"start": 300.0, "log": 120.0, "samples": 120.0, "alert": 120.0, "finish": 600.0}
"""How long a call may take. The library of a tracker may wait for its server for ever."""


class Backend(Protocol):
    """One run in one tracker. Any call may raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All numbers of a step, by the names of the catalogue."""

    def samples(self, step: int, table: str, rows: Rows) -> None:
        """A table of texts and numbers, such as ``samples`` or ``rollouts``."""

    def alert(self, step: int, kind: str, text: str) -> None:
        """A warning; ``kind`` is one word, such as ``entropy_collapse``."""

    def finish(self, rows: Rows, state: State) -> None:
        """The last call; ``rows`` are those of metrics.jsonl."""


class Copy:
    """A backend that cannot end the run: a failing call is a warning once, and is not repeated for
    ``RETRY_S`` seconds. After a call that does not return in time there are no others. What was
    missed stays missing in the tracker.

    Args:
        start: begins the run there; called again later if it fails
    """

    def __init__(self, name: str, start: Callable[[], Backend]) -> None:
        self.name = name
        self._start = start
        self._backend: Backend | None = None
        self._retry_at: dict[str, float] = {}  # by call, of those that have failed
        self._missed = 0
        self._is_stuck = False
        self._try("start", lambda backend: None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try("log", lambda backend: backend.log(step, metrics))

    def samples(self, step: int, table: str, rows: Rows) -> None:
        self._try("samples", lambda backend: backend.samples(step, table, rows))

    def alert(self, step: int, kind: str, text: str) -> None:
        self._try("alert", lambda backend: backend.alert(step, kind, text))

    def finish(self, rows: Rows, state: State) -> None:
        if self._backend is not None:
            self._try("finish", lambda backend: backend.finish(rows, state))
        if self._missed:
            logger.warning(
                "%s missed %d calls of this run; the files in its folder are complete",
                self.name,
                self._missed,
            )

    def _try(self, call: str, action: Callable[[Backend], None]) -> None:
        # Nothing can be called on a run that did not start.
        blocked_by = call if self._backend is not None else "start"
        if self._is_stuck or time.monotonic() < self._retry_at.get(blocked_by, 0.0):
            self._missed += 1
            return
        began, limit = time.monotonic(), LIMITS_S[blocked_by]
        try:
            within(limit, lambda: self._call(action))
        except Exception as error:  # a library, its files and a network: anything may be raised
            self._missed += call != "start"
            self._is_stuck = time.monotonic() - began >= limit  # its thread goes on
            if blocked_by not in self._retry_at or self._is_stuck:
                logger.warning(
                    "%s failed (%s: %s: %s). The run goes on and its files are complete; %s is %s",
                    self.name,
                    call,
                    type(error).__name__,
                    error,
                    self.name,
                    f"not called any more after {limit:.0f} s without an answer"
                    if self._is_stuck
                    else f"tried again every {RETRY_S:.0f} s, without further warnings",
                )
            self._retry_at[blocked_by] = time.monotonic() + RETRY_S

    def _call(self, action: Callable[[Backend], None]) -> None:
        if self._backend is None:
            self._backend = self._start()
        action(self._backend)


def start_copies(
    run_dir: Path, tracking: TrackingConfig, config: Mapping[str, Any], first_step: int
) -> list[Copy]:
    """Begin the run in each of ``tracking.backends``, or go on with it there.

    Args:
        config: the resolved configuration, without secrets
        first_step: as in `rltrain.tracking.tracker.Tracker`
    """

    def starter(name: str) -> Callable[[], Backend]:
        # Each loads its library, which takes seconds.
        return lambda: import_module(f"rltrain.tracking.{name}").start(
            run_dir, tracking, config, first_step
        )

    return [Copy(name, starter(name)) for name in tracking.backends]


def check_packages(tracking: TrackingConfig) -> None:
    """Raise ValueError for a backend whose library is not installed; it names the extra."""
    for name in tracking.backends:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # no origin: only a folder of that name
            extra = "rltrain" if name == "wandb" else f"rltrain[{name}]"
            raise ValueError(
                f"tracking.backends has {name}, and its library is not installed: pip install "
                f"'{extra}', or leave {name} out [RL7003]"
            )
