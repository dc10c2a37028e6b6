"""The short form of ``make chaos``: one run that loses an engine, a rank and a reward worker.

It goes on by itself each time, and ends with the bits of a run that nothing happened to.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.chaos.plan import short
from tests.chaos.results import table
from tests.chaos.run import Reference, execute

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Sockets are below it, whose paths have to be short: pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_run_that_loses_three_parts_ends_as_if_it_had_not(short_folder: Path) -> None:
    chain = execute(short(), Reference(short_folder))
    rows = chain.rows
    told = "\n".join([chain.failure, *table(rows)])
    assert len(rows) == 3 and not chain.failure, told
    engine, rank, worker = rows
    assert all(row.bitwise and not row.left and not row.ended for row in rows), told
    assert [row.steps_lost for row in rows] == [0, 0, 0], told
    assert "engine 0" in engine.said, told
    assert "policy worker 0" in rank.said and "resumed after step 2" in rank.said, told
    assert "reward worker 0: its process was killed by SIGKILL" in worker.said, told
