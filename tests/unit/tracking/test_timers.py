"""Phases and the step they belong to."""

import itertools

import pytest

from rltrain.tracking.metrics import check_metrics
from rltrain.tracking.timers import StepTimer


def _clock(*times):
    return itertools.chain(times).__next__


def test_phases_and_the_rest_sum_to_the_step():
    timer = StepTimer(clock=_clock(100.0, 101.0, 103.0, 103.5, 104.0, 105.0, 105.25, 106.0))
    for name in ("generate", "update", "update"):
        with timer.phase(name):
            pass
    metrics = timer.metrics()
    assert metrics == {
        "time/generate": 2.0,
        "time/update": 0.75,
        "time/other": 3.25,
        "time/step": 6.0,
    }
    check_metrics(metrics)


def test_a_phase_that_raises_is_counted_and_closed():
    timer = StepTimer(clock=_clock(0.0, 1.0, 4.0, 5.0))
    with pytest.raises(RuntimeError), timer.phase("reward"):
        raise RuntimeError
    assert timer.metrics()["time/reward"] == 3.0


def test_phases_do_not_nest():
    timer = StepTimer()
    refused = pytest.raises(AssertionError, match="reward opened inside phase generate")
    with refused, timer.phase("generate"), timer.phase("reward"):
        pass
