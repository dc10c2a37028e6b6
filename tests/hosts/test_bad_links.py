"""A network that is slow, drops frames, is gone for a while or for good."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.hosts.links import Quality
from tests.hosts.runs import arguments, check_ended, check_same
from tests.hosts.stage import Run, Stage, stage

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CPU"),
    pytest.mark.usefixtures("real_hosts"),
]
CUT_S = 5.0
NOTICED_S = 60.0
"""Within which a run ends that has lost a node."""
CUT_OFF_S = 120.0
"""Within which nothing of the run is left on the node that is cut off, which has to find out
itself."""


def without_checkpoint(run: Run, step: int) -> float:
    """Seconds of a step; the last one also writes the weights, to disks."""
    row = run.metrics[step]
    return float(row["time/step"] - row.get("time/checkpoint", 0.0))


@pytest.fixture(scope="module")
def cut_for_a_while(three: Stage) -> Run:
    """Three steps over three hosts; at the beginning of the second a link is gone for a while."""
    run = three.start(*arguments(three, "trainer.steps=3"), folder=three.shared / "cut")
    run.wait_for_step(1)
    try:
        three.cables[-1].cut()
        time.sleep(CUT_S)
    finally:
        three.cables[-1].mend()
    return run.wait()


def test_a_link_that_comes_back_costs_nothing_but_time(
    three: Stage, cut_for_a_while: Run, small_on_one_host: Run, shown: Callable[[str], None]
) -> None:
    check_same(cut_for_a_while, small_on_one_host)
    during, after = (without_checkpoint(cut_for_a_while, step) for step in (2, 3))
    shown(f"a link cut for {CUT_S:g} s: step 2 took {during:.1f} s, step 3 {after:.1f} s")
    check_ended(three)


def test_a_bad_link_makes_it_slower_and_not_wrong(
    tmp_path: Path, small_on_one_host: Run, cut_for_a_while: Run, shown: Callable[[str], None]
) -> None:
    quality = Quality()
    with stage(tmp_path / "stage", bad=quality) as made:
        run = made.start(*arguments(made, "trainer.steps=3"), folder=made.shared / "bad").wait()
        check_same(run, small_on_one_host)
        good, bad = (without_checkpoint(one, 3) for one in (cut_for_a_while, run))
        shown(
            f"{quality.delay_ms:g} ms, {quality.loss:.0%} loss, {quality.rate_mbit:g} Mbit/s each "
            f"way ({made.cable_is}): step 3 took {bad:.1f} s; with a good link {good:.1f} s"
        )
        assert bad > good
        check_ended(made)


def test_a_link_that_is_cut_for_good_ends_the_run_everywhere(
    tmp_path: Path, shown: Callable[[str], None]
) -> None:
    with stage(tmp_path / "stage") as made:
        lost = made.hosts[-1]
        run = made.start(*arguments(made, "trainer.steps=1000"))
        run.wait_for_step(2)
        made.cables[-1].cut()
        began = time.monotonic()
        run.wait(expect=1, limit_s=3 * NOTICED_S)
        taken = time.monotonic() - began
        assert f"node {lost.address} is lost" in run.output, run.output
        assert "[RL4020]" in run.output and "Traceback" not in run.output
        shown(f"a link cut for good: the run ended after {taken:.0f} s, naming {lost.address}")
        assert taken < NOTICED_S
        check_ended(made, hosts=made.hosts[:-1])
        check_ended(made, hosts=made.hosts[-1:], limit_s=CUT_OFF_S)
        shown(f"nothing of it was left on {lost.name} after {time.monotonic() - began:.0f} s")
