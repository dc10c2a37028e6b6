"""A leak is told from noise, and a process by what it is to a run."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.leak_samples import RUN, Watcher, objects, role_of
from benchmarks.leak_slopes import slope_of, theil_sen
from benchmarks.leaks import is_leak, slopes_of, table

STEPS = range(51, 251)


def noise(seed: int, scale: float = 1e6, keeps: float = 0.8) -> list[float]:
    """Of neighbours that depend on each other, as memory does."""
    drawn, value, values = random.Random(seed), 0.0, []
    for _ in STEPS:
        value = keeps * value + drawn.gauss(0, scale)
        values.append(1e9 + value)
    return values


def test_noise_alone_seldom_grows() -> None:
    found = [is_leak("uss_bytes", slope_of(STEPS, noise(seed))) for seed in range(40)]
    assert sum(found) <= 4


def test_a_leak_in_the_noise_is_found_and_measured() -> None:
    inside = 0
    for seed in range(10):
        slope = slope_of(
            STEPS, [v + 1e5 * s for s, v in zip(STEPS, noise(seed), strict=True)], seed
        )
        assert is_leak("uss_bytes", slope)
        inside += slope.low < 1e5 < slope.high
    assert inside >= 7


def test_one_more_now_and_then_is_a_leak_and_one_jump_is_none() -> None:
    assert is_leak("handles", slope_of(STEPS, [40.0 + step // 20 for step in STEPS]))
    spikes = [40.0 + 30 * (step in (60, 61, 249)) for step in STEPS]
    assert slope_of(STEPS, spikes).value == 0
    assert not is_leak("handles", slope_of(STEPS, spikes))


def test_what_falls_or_never_changes_is_no_leak() -> None:
    assert not slope_of(STEPS, [-float(step) for step in STEPS]).grows
    still = slope_of(STEPS, [7.0] * len(STEPS))
    assert (still.value, still.low, still.high, still.growth) == (0, 0, 0, 0)


@given(st.floats(-1e3, 1e3), st.floats(-1e6, 1e6))
def test_the_slope_of_a_line_is_its_own(slope: float, start: float) -> None:
    values = [start + slope * step for step in range(24)]
    assert theil_sen(range(24), values) == pytest.approx(slope, abs=1e-6)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 16 samples, found 3"):
        slope_of([1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::RolloutEngine.generate", "RolloutEngine"),
        ("VLLM::EngineCore", "EngineCore"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --x=1", "raylet"),
        ("/site-packages/ray/core/src/ray/gcs/gcs_server --y", "gcs"),
        ("python -u /ray/_private/log_monitor.py", "log_monitor"),
        ("python -m rltrain.environments.reward_worker 5 {}", "reward_worker"),
        ("python -m rltrain.actors.guardian 77", "guardian"),
        ("python -B -c from multiprocessing.resource_tracker import main", "resource_tracker"),
        ("cat", "the name"),
    ],
)
def test_roles(command: str, role: str) -> None:
    assert role_of(command, "the name") == role


def test_a_process_is_seen_with_its_child_and_what_it_opens(tmp_path: Path) -> None:
    """More handles, threads, memory and temporary files between two samples are in the table."""
    source = (
        "import subprocess, sys, threading, pathlib\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        "held = []\n"
        "for line in sys.stdin:\n"
        "    held += [open('/dev/null'), bytearray(b'x' * 2**22)]\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(len(held))).touch()\n"
        "    print(flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        watcher = Watcher(process.pid, tmp_path)
        samples = {}
        for step in range(30):
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline()
            samples[step] = watcher.sample()
    finally:
        process.kill()
        process.wait()
    assert samples[3]["cat"]["processes"] == 1
    slopes = slopes_of(samples, 2)
    leaks = {key for key, slope in slopes.items() if is_leak(key[1], slope)}
    expected = {("driver", name) for name in ("handles", "threads", "uss_bytes")}
    assert leaks == expected | {(RUN, "tmp_entries"), (RUN, "tmp_top_entries")}
    assert slopes["driver", "handles"].value == 1
    assert slopes["driver", "uss_bytes"].value == pytest.approx(2**22, rel=0.2)
    shown = table(slopes)
    assert shown.count("**grows**") == 5 and "| driver | handles | 1 |" in shown


def test_the_object_store_is_read_where_the_raylet_writes(tmp_path: Path) -> None:
    assert objects(tmp_path) == {}
    logs = tmp_path / "ray" / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug_state.txt").write_text(
        "- num pinned objects: 1\n- pinned objects size: 2759\n- num local plasma objects: 3\n"
    )
    assert objects(tmp_path) == {"ray_objects": 3, "ray_pinned_bytes": 2759}
