"""Verdicts compare a number with its spread in the same run."""

import pytest

from rltrain.tracking.report.verdicts import verdicts


def _row(**metrics):
    return {name.replace("__", "/"): value for name, value in metrics.items()}


def test_verdicts_weigh_by_tokens_and_use_only_paired_steps():
    rows = [
        _row(step=0, mismatch__k3=1e-4, mismatch_native__k3=4e-4, mismatch__num_tokens=100),
        _row(step=1, mismatch__k3=9.0, mismatch__num_tokens=1000),
        _row(step=2, mismatch__k3=3e-4, mismatch_native__k3=8e-4, mismatch__num_tokens=300),
    ]
    (k3,) = verdicts(rows, "r3")
    assert k3.value == "2.5e-4"
    assert k3.detail == "native 7e-4, 2.8x lower (2.7 to 4.0 over 2 steps); 400 tokens"
    assert k3.state == "good"


@pytest.mark.parametrize("name", ["k3", "abs_diff_median_flipped"])
@pytest.mark.parametrize(
    ("trained", "replay", "state"),
    [
        ([0.9, 0.2, 0.3], "r3", "good"),
        ([1.1, 0.2, 0.3], "r3", "mixed"),  # 2 times lower on the whole, and worse in step 1
        ([1.0, 1.0], "r3", "bad"),
        ([0.2], "r3", "unjudged"),  # one step knows nothing of its spread
        ([1.2], "r3", "bad"),
        ([0.1, 0.1], "r2", "unjudged"),
        ([1.0, 1.0], "off", "unjudged"),
    ],
)
def test_a_mismatch_is_judged_by_every_step_under_r3_only(name, trained, replay, state):
    rows = [
        {
            "step": step,
            f"mismatch/{name}": value,
            f"mismatch_native/{name}": 1.0,
            "mismatch/num_flipped": 7,
            "mismatch/num_tokens": 7,
        }
        for step, value in enumerate(trained, start=1)
    ]
    (found,) = verdicts(rows, replay)
    assert found.state == state
    assert f"{7 * len(trained)} tokens" in found.detail
    if len(trained) > 1:
        low, high = 1 / max(trained), 1 / min(trained)
        assert f"({low:.1f} to {high:.1f} over {len(trained)} steps)" in found.detail


@pytest.mark.parametrize(
    ("accuracies", "state"),
    [
        ([0.5, 0.9], "good"),
        ([0.5, 0.56], "mixed"),  # 6 +- 6.1 points of 512 problems
        ([0.5, 0.57], "good"),
        ([0.5, 0.4], "bad"),
        ([0.5, 0.9, 0.7], "mixed"),  # it has learned, and lost some of it again
        ([1.0, 1.0], "mixed"),
        ([0.0, 0.004], "mixed"),  # 2 of 512
    ],
)
def test_accuracy_is_judged_by_the_interval_of_its_problems(accuracies, state):
    rows = [
        _row(step=step, eval__accuracy=value, eval__num_scored=512)
        for step, value in enumerate(accuracies)
    ]
    (accuracy,) = verdicts(rows, "r3")
    assert accuracy.state == state
    assert ("90.0% at step 1" in accuracy.detail) == (accuracies[-1] == 0.7)


def test_coverage_and_accuracy_verdicts():
    rows = [
        _row(step=0, routing__coverage=1.0, eval__accuracy=0.5),
        _row(step=1, routing__coverage=0.999),
        _row(step=2, routing__coverage=1.0, eval__accuracy=0.4),
    ]
    accuracy, coverage = verdicts(rows, "r3")
    assert (accuracy.value, accuracy.state) == ("50.0% to 40.0%", "unjudged")
    assert (coverage.value, coverage.state) == ("0.999", "bad")
    assert verdicts(rows[:1], "r3")[0].value == "1.0"
