"""Hosts for tests, and what is said about them at the end of the output."""

from collections.abc import Iterator

import pytest

from tests.hosts.namespaces import why_not
from tests.hosts.stage import Stage, stage

TABLES: list[str] = []
"""What tests measured, to be printed at the end."""


@pytest.fixture(scope="session")
def real_hosts() -> None:
    """Skips what needs a network between hosts where none can be made."""
    if reason := why_not():
        pytest.skip(f"needs network namespaces, which cannot be made here: {reason}")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A with Ray's head and the driver, B and C with three CPUs each."""
    with stage(tmp_path_factory.mktemp("three") / "stage") as made:
        yield made


@pytest.fixture(scope="session")
def table() -> list[str]:
    """Add lines to it."""
    return TABLES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = why_not()
    terminalreporter.section("hosts")
    kind = f"raylets on 127.0.0.x, for no hosts can be made: {reason}" if reason else "namespaces"
    terminalreporter.write_line(f"tests/hosts ran on {kind}")
    for line in TABLES:
        terminalreporter.write_line(line)
