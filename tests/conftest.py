"""The environment of every test: quiet, isolated, and without a network."""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch, Ray or vLLM are imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["WANDB_MODE"] = "offline"

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow; that is no fault of the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


SHOWN = "shown"
"""Name of a test's property: a line for the end of the output."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU on a machine without one, and say so."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))


@pytest.fixture
def shown(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes lines to print at the end of the output, whether the test passes or not."""
    return lambda line: record_property(SHOWN, line)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for of_kind in terminalreporter.stats.values() for r in of_kind]
    for report in reports:
        lines = [text for name, text in getattr(report, "user_properties", ()) if name == SHOWN]
        if lines and report.when == "teardown":
            terminalreporter.section(report.nodeid)
            terminalreporter.write_line("\n".join(lines))


@pytest.fixture(scope="session")
def measured() -> Iterator[dict[str, dict[str, Any]]]:
    """What tests measure of each model; added to the JSON file that RLTRAIN_MEASURED names."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    yield found
    if name := os.environ.get("RLTRAIN_MEASURED"):
        file = Path(name)
        before = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({k: before.get(k, {}) | found[k] for k in before | found}))
