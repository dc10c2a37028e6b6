"""The GPU log, with a real program for nvidia-smi that prints what nvidia-smi prints."""

import os
import time

import pytest

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking.gpus import name_of, parse, read_gpus, start_gpu_log, timeline
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.tracker import Tracker

HEADER = "timestamp, index, name, utilization.gpu [%], memory.used [MiB]"
LINES = (
    HEADER,
    "2026/11/28 20:00:01.250, 0, NVIDIA H200, 80, 1024",
    "2026/11/28 20:00:01.251, 1, NVIDIA H200, 40, 2048",
    "2026/11/28 20:00:02.250, 0, NVIDIA H200, 100, 3072",
    "2026/11/28 20:00:02.251, 1, NVIDIA H200, [N/A], 2048",
    "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.",
)
SCRIPT = """#!/bin/sh
echo "$$ $*" >> "{folder}/calls"
case "$*" in *--query-gpu=name*) echo "NVIDIA H200"; exit;; esac
printf '%s\\n' {lines}
exec sleep 60
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts the program on PATH; returns a function that gives each call's process and arguments."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    lines = " ".join(f"'{line}'" for line in LINES)
    program.write_text(SCRIPT.format(folder=tmp_path, lines=lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return lambda: [line.split(" ", 1) for line in (tmp_path / "calls").read_text().splitlines()]


def _wait_for(path, lines):
    end = time.monotonic() + 10
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < end, path.read_text() if path.exists() else "no file"
        time.sleep(0.01)


def _alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_logs_its_gpus_and_ends_what_it_started(tmp_path, nvidia_smi, caplog):
    caplog.set_level("INFO", logger="rltrain.tracking.tracker")
    folder = tmp_path / "run"
    folder.mkdir()
    tracking = TrackingConfig(wandb="disabled")
    with Tracker(folder, tracking, {}, {}, num_steps=2, gpus=["0", "1"]) as tracker:
        _wait_for(folder / "gpus.csv", len(LINES))
        tracker.log(1, {"time/generate": 3.0, "time/other": 1.0, "time/step": 4.0})
        tracker.log(2, {"time/generate": 3.0, "time/other": 1.0, "time/step": 4.0})
        ((pid, arguments),) = nvidia_smi()
        assert _alive(pid)
    assert not _alive(pid)
    assert "--id=0,1" in arguments
    assert "--query-gpu=timestamp,index,name,utilization.gpu,memory.used" in arguments
    first, second = read_jsonl(folder / "metrics.jsonl")
    assert first["gpu/utilization"] == pytest.approx((0.8 + 0.4 + 1.0) / 3)
    assert first["gpu/memory_gib"] == 3.0
    assert "gpu/utilization" not in second  # nothing was sampled since
    page = (folder / "report.html").read_text()
    assert "Share of a second in which a kernel ran" in page
    assert "80% on average" in page  # the mean of the GPUs: of 60 % and of 100 %
    assert "3 GiB at most" in page
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("Where a step goes: generate 75%, other 25%.") for line in said)
    assert "Where a step goes: generate 75%" in page


def test_without_gpus_nothing_is_started(tmp_path, nvidia_smi):
    assert start_gpu_log(tmp_path / "gpus.csv", []) is None
    assert not (tmp_path / "calls").exists()


def test_without_nvidia_smi_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start_gpu_log(tmp_path / "gpus.csv", ["0"]) is None
    assert name_of(["0"]) == ""


def test_a_card_is_asked_for_its_name(nvidia_smi, tmp_path):
    assert name_of(["1", "0"]) == "NVIDIA H200"
    assert nvidia_smi()[0][1] == "--query-gpu=name --format=csv,noheader --id=1"
    assert name_of([]) == ""
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert name_of(["0"]) == ""


def test_lines_that_are_no_sample_are_left_out():
    samples = parse(LINES)
    assert [(each.gpu, each.utilization, each.memory_gib) for each in samples] == [
        (0, 0.8, 1.0),
        (1, 0.4, 2.0),
        (0, 1.0, 3.0),
        (1, None, 2.0),
    ]
    assert samples[0].name == "NVIDIA H200"


def test_a_torn_last_line_is_left_out(tmp_path):
    whole = "\n".join(LINES[:2])
    (tmp_path / "gpus.csv").write_text(f"{whole}\n{LINES[2][:-2]}")
    assert len(read_gpus(tmp_path / "gpus.csv")) == 1
    assert read_gpus(tmp_path / "nothing.csv") == []


def test_a_timeline_has_each_second_and_in_a_long_run_means():
    line = timeline(parse(LINES), lambda each: each.memory_gib)
    assert line.seconds == [0, 1]
    assert (line.lowest, line.mean, line.highest) == ([1, 2], [1.5, 2.5], [2, 3])
    busy = timeline(parse(LINES), lambda each: each.utilization)
    assert busy.lowest == [0.4, 1.0]
    long = [
        f"2026/11/28 {10 + i // 3600}:{i // 60 % 60:02}:{i % 60:02}.000, 0, X, {i % 2 * 100}, 1"
        for i in range(4000)
    ]
    line = timeline(parse(long), lambda each: each.utilization, points=100)
    assert len(line.seconds) <= 101
    assert line.mean[50] == pytest.approx(0.5, abs=0.02)
    assert timeline([], lambda each: each.utilization).seconds == []
