"""The time that a run still takes, of runs whose times are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.tracking.eta import Eta, TimeLeft, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


SECONDS = st.floats(0.01, 1000.0)


@given(
    warm_up=SECONDS,
    update=SECONDS,
    parts=st.dictionaries(
        st.sampled_from(["eval", "checkpoint", "weight_sync"]),
        st.tuples(SECONDS, st.integers(1, 9)),
    ),
    num_steps=st.integers(3, 40),
    resumed_after=st.integers(0, 5),
)
def test_it_is_exact_from_the_third_step_whatever_only_some_steps_do(
    warm_up: float,
    update: float,
    parts: dict[str, tuple[float, int]],
    num_steps: int,
    resumed_after: int,
) -> None:
    """As long as each part was seen once. A part that was not is said to be left out."""

    def due(name: str, step: int) -> bool:
        return step % parts[name][1] == 0 or step == num_steps

    clock = Clock()
    eta = Eta(num_steps, {name: lambda step, name=name: due(name, step) for name in parts}, clock)
    seconds_of = {}
    for step in range(resumed_after + 1, num_steps + 1):
        seconds_of[step] = update + sum(parts[name][0] for name in parts if due(name, step))
    seen: set[str] = set()
    for taken, step in enumerate(seconds_of, start=1):
        eta.phase("generate")
        clock.now += update + (warm_up if taken == 1 else 0.0)
        for name, (seconds, _) in parts.items():
            if due(name, step):
                eta.phase(name)
                clock.now += seconds
                eta.phase(None)
                seen.add(name)
        left = eta.step(step)
        unseen = {name for name in parts if name not in seen}
        later = range(step + 1, num_steps + 1)
        missing = {name for name in unseen if any(due(name, other) for other in later)}
        if taken >= 3 or step == num_steps:
            assert left is not None and left.at_least == bool(missing)
            expected = sum(seconds_of[other] for other in later)
            for name in missing:
                expected -= parts[name][0] * sum(due(name, other) for other in later)
            assert left.seconds == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_what_precedes_the_first_step_is_no_step_but_its_evaluation_is_timed() -> None:
    clock = Clock()
    eta = Eta(5, {"eval": lambda step: step in (0, 5)}, clock)
    clock.now = 600.0  # engines start
    eta.phase("eval")
    clock.now += 7.0
    assert eta.step(0) is None
    clock.now += 10.0
    assert eta.step(1) == TimeLeft(4 * 10.0 + 7.0)


def test_a_slow_first_step_is_forgotten() -> None:
    clock = Clock()
    eta = Eta(10, {}, clock)
    eta.step(0)
    lefts = []
    for step, seconds in enumerate((90.0, 10.0, 20.0), start=1):
        clock.now += seconds
        lefts.append(eta.step(step))
    assert lefts == [TimeLeft(9 * 90.0), TimeLeft(8 * 10.0), TimeLeft(7 * 15.0)]


def test_recent_steps_count() -> None:
    clock = Clock()
    eta = Eta(1000, {}, clock)
    for step in range(200):
        clock.now += 1.0 if step < 100 else 5.0
        left = eta.step(step)
    assert left == TimeLeft(801 * 5.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (75, "1m15s"), (3600, "1h00m"), (7384, "2h03m"), (90000, "1d01h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert str(TimeLeft(seconds, at_least=True)) == f"{text}+"
