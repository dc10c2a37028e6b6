"""Hosts for tests."""

from collections.abc import Iterator

import pytest

from tests.hosts.namespaces import why_not
from tests.hosts.runs import WIDE, arguments
from tests.hosts.stage import Run, Stage, stage


@pytest.fixture(scope="session")
def real_hosts() -> None:
    """Skips what needs a network between hosts where none can be made."""
    if reason := why_not():
        pytest.skip(f"needs network namespaces, which cannot be made here: {reason}")


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A with Ray's head and the driver, B and C with three CPUs each."""
    with stage(tmp_path_factory.mktemp("three") / "stage") as made:
        yield made


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One host, on which runs start their own Ray."""
    with stage(tmp_path_factory.mktemp("alone") / "stage", cpus=[0], ray=False) as made:
        yield made


@pytest.fixture(scope="session")
def small_on_one_host(alone: Stage) -> Run:
    """Three steps with all ranks and both engines on one host."""
    chosen = arguments(alone, "trainer.steps=3", across=False)
    return alone.start(*chosen, folder=alone.shared / "small").wait()


@pytest.fixture(scope="session")
def wide_on_one_host(alone: Stage) -> Run:
    """As `small_on_one_host`, with more data and a step more."""
    chosen = arguments(alone, *WIDE, across=False)
    return alone.start(*chosen, folder=alone.shared / "wide").wait()
