"""Hosts that share no disk but the model's: what each one writes stays there, and is found."""

import re
from pathlib import Path

import pytest
import torch

from tests.hosts.runs import arguments, check_ended, results
from tests.hosts.stage import RUN, Machine, Run, Stage

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
    pytest.mark.usefixtures("real_hosts"),
]
COUNTED_ANEW = "rollout/weight_version"
"""By the engines, and a resumed run has new ones."""


def ranks_with_files(machine: Machine, folder: Path) -> set[str]:
    """Ranks whose tensors are in a folder of that host, in files such as __2_0.distcp."""
    names = [file.name for file in machine.path(folder).glob("*.distcp")]
    return {found[1] for name in names if (found := re.match(r"__(\d+)_", name))}


def test_each_host_keeps_its_ranks_files_and_a_run_goes_on_from_them(
    three: Stage, small_on_one_host: Run
) -> None:
    chosen = arguments(three, "checkpoint.every=2")
    three.start(*chosen, "trainer.steps=2").wait()
    saved = RUN / "checkpoints" / "step_000002" / "policy"
    assert [ranks_with_files(machine, saved) for machine in three.hosts] == [
        set(),
        {"0", "1"},
        {"2", "3"},
    ]
    again = three.start(*chosen, "trainer.steps=3", "trainer.resume=auto").wait()
    assert "step_000002" in again.output
    last, expected = results(again)[3], results(small_on_one_host)[3]
    last[COUNTED_ANEW] = expected[COUNTED_ANEW]
    assert last == expected
    check_ended(three)
