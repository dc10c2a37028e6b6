"""Where the time of one step goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Times one step and its phases; make a new one when a step begins.

    Args:
        on_phase: is called with the name of a phase as it begins, and with None as it ends

    Phases do not nest, so they and ``time/other`` sum to ``time/step`` and can be stacked.

        timer = StepTimer()
        with timer.phase("generate"):
            ...
        timer.metrics()  # {"time/generate": 1.2, "time/other": 0.1, "time/step": 1.3}
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_phase: Callable[[str | None], None] = lambda name: None,
    ) -> None:
        self._clock, self._on_phase = clock, on_phase
        self._start = clock()
        self._phases: dict[str, float] = {}
        self._open: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what runs inside to ``time/<name>``, also where it raises."""
        assert self._open is None, f"phase {name} opened inside phase {self._open}"
        self._on_phase(name)
        self._open, start = name, self._clock()
        try:
            yield
        finally:
            self._on_phase(None)
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - start
            self._open = None

    def metrics(self) -> dict[str, float]:
        """Seconds so far, of every phase that ran, of what no phase covers, and of the whole."""
        assert self._open is None, f"phase {self._open} is still running"
        step = self._clock() - self._start
        seconds = {f"time/{name}": value for name, value in self._phases.items()}
        return {**seconds, "time/other": step - sum(seconds.values()), "time/step": step}
