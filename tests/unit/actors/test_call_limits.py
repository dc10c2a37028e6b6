"""A limit is learned from earlier calls of the same phase, and is never below the floor."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.actors import run_processes
from rltrain.actors.call_limits import ENOUGH, LIMITS, CallLimits, learn_anew
from rltrain.actors.run_processes import Stopped, dump_stacks

SECONDS = st.lists(st.floats(0, 1e4), max_size=50)


@given(SECONDS, st.floats(2, 100), st.floats(1, 1000), st.floats(1, 1e5))
def test_a_limit_is_a_multiple_of_the_median(
    seconds: list[float], factor: float, floor_s: float, most_s: float
) -> None:
    limits = CallLimits(factor, floor_s)
    for each in seconds:
        limits.took("policy.update", each)
    found = limits.limit("policy.update", most_s)
    learned = max(floor_s, factor * median(seconds)) if len(seconds) >= ENOUGH else most_s
    assert found == min(most_s, learned)


def test_phases_calls_and_runs_are_apart() -> None:
    learn_anew(2.0, 1.0)
    LIMITS.phase = "update"
    for _ in range(ENOUGH):
        LIMITS.took("policy.score", 3.0)
    assert LIMITS.limit("policy.score", 100.0) == 6.0
    assert LIMITS.limit("policy.update", 100.0) == 100.0
    LIMITS.phase = "eval"
    assert LIMITS.limit("policy.score", 100.0) == 100.0
    learn_anew(None, 1.0)
    assert LIMITS.limit("policy.score", 100.0) == 100.0


def test_stacks_are_asked_of_those_alone_who_can_write_them(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("w+")
    script = "import faulthandler, signal, time\n"
    script += "faulthandler.register(signal.SIGUSR1, file=2)\nprint(flush=True)\ntime.sleep(60)"
    prepared, other = (
        subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=log)
        for text in (script, "import time; print(flush=True); time.sleep(60)")
    )
    try:
        for process in (prepared, other):
            assert process.stdout is not None and process.stdout.readline()
        dump_stacks([psutil.Process(prepared.pid), psutil.Process(other.pid)])
        end = time.monotonic() + 10
        while 'File "<string>", line' not in (tmp_path / "log").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert other.poll() is None
    finally:
        for process in (prepared, other):
            process.kill()


def send(process: psutil.Process, number: int) -> None:
    """Returns when it has had its effect."""
    process.send_signal(number)
    while (process.status() == psutil.STATUS_STOPPED) != (number == signal.SIGSTOP):
        time.sleep(0.01)


def test_what_is_stopped_for_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_processes, "STOPPED_S", 0.3)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    looked_at = [psutil.Process(child.pid) for child in children]
    watch = Stopped()
    try:
        send(looked_at[0], signal.SIGSTOP)
        assert watch.look(looked_at) == []
        time.sleep(0.4)
        assert watch.look(looked_at) == looked_at[:1]
        assert children[0].wait(10) == -signal.SIGKILL and children[1].poll() is None
        assert watch.look(looked_at) == []
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
            send(looked_at[1], number)
            assert watch.look(looked_at) == []
            time.sleep(0.2)
    finally:
        for child in children:
            child.kill()
