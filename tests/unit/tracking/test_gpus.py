"""The GPU log. This machine has no driver: tests that need one put functions in pynvml's place."""

import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from rltrain.config.trainer import TrackingConfig
from rltrain.tracking import gpus
from rltrain.tracking.gpus import (
    HEADER,
    NODE_HEADER,
    Device,
    csv_line,
    gpu_name,
    gpu_source,
    parse,
    read_gpus,
    start_gpu_log,
    timeline,
)
from rltrain.tracking.jsonl import read_jsonl
from rltrain.tracking.tracker import Tracker

GIB = 2**30
LINES = (
    HEADER,
    "2026/11/28 20:00:01.250, 0, NVIDIA H200, 80, 1024",
    "2026/11/28 20:00:01.251, 1, NVIDIA H200, 40, 2048",
    "2026/11/28 20:00:02.250, 0, NVIDIA H200, 100, 3072",
    "2026/11/28 20:00:02.251, 1, NVIDIA H200, [N/A], 2048",
    "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.",
)


class Driver:
    """Two GPUs. A reading is a number, or the NVML error that the driver answers with."""

    def __init__(self, monkeypatch):
        self.init_error = None
        self.percent = {0: [80, 100], 1: [40]}  # the last one stays
        self.used = {0: [GIB, 3 * GIB], 1: [2 * GIB + 1]}
        self.names = ["NVIDIA H200", "NVIDIA H200"]
        for name in ("Init", *(f"DeviceGet{name}" for name in self.FUNCTIONS)):
            monkeypatch.setattr(pynvml, f"nvml{name}", getattr(self, name.removeprefix("Device")))

    FUNCTIONS = (
        "HandleByIndex",
        "HandleByUUID",
        "Index",
        "Name",
        "UtilizationRates",
        "MemoryInfo",
    )

    def Init(self):
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)

    def GetHandleByIndex(self, index):
        if index >= len(self.names):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def GetHandleByUUID(self, uuid):
        if not uuid.startswith("GPU-"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(uuid.removeprefix("GPU-"))

    def GetIndex(self, handle):
        return handle

    def GetName(self, handle):
        return self.names[handle]

    def GetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._next(self.percent[handle]))

    def GetMemoryInfo(self, handle, version):
        assert version == pynvml.nvmlMemory_v2
        return SimpleNamespace(used=self._next(self.used[handle]))

    @staticmethod
    def _next(readings):
        reading = readings.pop(0) if len(readings) > 1 else readings[0]
        if isinstance(reading, pynvml.NVMLError):
            raise reading
        return reading


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(gpus, "INTERVAL_S", 0.01)
    return Driver(monkeypatch)


def _wait_for(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def _num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def test_a_run_logs_its_gpus_and_ends_the_thread(tmp_path, driver, caplog):
    caplog.set_level("INFO", logger="rltrain.tracking.tracker")
    folder = tmp_path / "run"
    folder.mkdir()
    tracking = TrackingConfig(backends=[])
    before = set(threading.enumerate())
    with Tracker(folder, tracking, {}, {}, num_steps=2, gpus=["GPU-0", "1"]) as tracker:
        (thread,) = [t for t in threading.enumerate() if t not in before and t.daemon]
        _wait_for(lambda: _num_lines(folder / "gpus.csv") >= 5)
        tracker.log(1, {"time/generate": 3.0, "time/other": 1.0, "time/step": 4.0})
    assert not thread.is_alive()
    assert (folder / "gpus.csv").read_text().splitlines()[0] == HEADER
    samples = read_gpus(folder / "gpus.csv")
    assert [(s.gpu, s.utilization, s.memory_gib) for s in samples[:4]] == [
        (0, 0.8, 1.0),
        (1, 0.4, 2.0),
        (0, 1.0, 3.0),
        (1, 0.4, 2.0),
    ]
    assert abs((datetime.now() - samples[0].time).total_seconds()) < 60
    (first,) = read_jsonl(folder / "metrics.jsonl")
    assert 0.4 < first["gpu/utilization"] < 1.0
    assert first["gpu/memory_gib"] == 3.0
    page = (folder / "report.html").read_text()
    assert "Share of a second in which a kernel ran" in page
    assert "GPU memory in use" in page
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("Where a step goes: generate 75%, other 25%.") for line in said)
    assert "Where a step goes: generate 75%" in page


def test_metrics_are_of_the_samples_since_the_last_call(tmp_path, driver, monkeypatch):
    monkeypatch.setattr(gpus, "INTERVAL_S", 60.0)
    log = start_gpu_log(tmp_path / "gpus.csv", ["0", "1"])
    _wait_for(lambda: _num_lines(tmp_path / "gpus.csv") == 3)
    assert log.metrics() == {"gpu/utilization": pytest.approx(0.6), "gpu/memory_gib": 2.0}
    assert log.metrics() == {}
    started = time.monotonic()
    log.close()  # does not wait for the next sample
    assert time.monotonic() - started < 10


def test_without_gpus_or_a_driver_nothing_is_sampled(tmp_path, driver, caplog):
    driver.init_error = pynvml.NVML_ERROR_UNKNOWN  # asked, it would be logged
    assert start_gpu_log(tmp_path / "gpus.csv", []) is None
    for driver.init_error in (
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    ):
        assert start_gpu_log(tmp_path / "gpus.csv", ["0"]) is None
        assert gpu_name(["0"]) == ""
    assert not caplog.records
    assert not (tmp_path / "gpus.csv").exists()


def test_on_a_machine_without_a_driver_nothing_is_sampled(tmp_path, caplog):
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pytest.skip("this machine has an NVIDIA driver")
    assert start_gpu_log(tmp_path / "gpus.csv", ["0"]) is None
    assert gpu_name(["0"]) == ""
    assert not caplog.records
    assert not (tmp_path / "gpus.csv").exists()


@pytest.mark.parametrize("gpu", ["2", "MIG-1"])
def test_a_gpu_that_nvml_does_not_know_is_one_line(gpu, tmp_path, driver, caplog):
    assert start_gpu_log(tmp_path / "gpus.csv", ["0", gpu]) is None
    assert gpu_name([gpu]) == ""
    (record,) = caplog.records
    assert record.getMessage().startswith(f"GPUs 0,{gpu} are not sampled: ")
    assert not (tmp_path / "gpus.csv").exists()


def test_an_error_of_the_driver_ends_sampling_with_one_line(tmp_path, driver, caplog):
    driver.percent[1] = [40, 50, pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)]
    log = start_gpu_log(tmp_path / "gpus.csv", ["0", "1"])
    _wait_for(lambda: not log._thread.is_alive())
    (record,) = caplog.records
    assert "gpus.csv has no GPU figures from here on: GPU is lost" in record.getMessage()
    assert [sample.gpu for sample in read_gpus(tmp_path / "gpus.csv")] == [0, 1, 0, 1, 0]
    assert log.metrics()["gpu/memory_gib"] == 3.0
    log.close()


def test_a_file_that_cannot_be_written_ends_sampling_with_one_line(tmp_path, driver, caplog):
    log = start_gpu_log(tmp_path / "no folder" / "gpus.csv", ["0"])
    log.close()
    (record,) = caplog.records
    assert "No such file" in record.getMessage()


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND]
)
def test_a_figure_that_the_gpu_does_not_have_is_empty(error, tmp_path, driver):
    driver.percent[0] = [pynvml.NVMLError(error)]
    driver.used[1] = [pynvml.NVMLError(error)]
    log = start_gpu_log(tmp_path / "gpus.csv", ["0", "1"])
    _wait_for(lambda: _num_lines(tmp_path / "gpus.csv") >= 3)
    log.close()
    samples = read_gpus(tmp_path / "gpus.csv")
    assert [(s.utilization, s.memory_gib) for s in samples[:2]] == [(None, 1.0), (0.4, None)]


def test_close_does_not_wait_for_a_driver_that_hangs(tmp_path, driver, monkeypatch, caplog):
    asked, answer = threading.Event(), threading.Event()

    def hang(handle):
        asked.set()
        answer.wait(60)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", hang)
    monkeypatch.setattr(gpus, "CLOSE_TIMEOUT_S", 0.05)
    log = start_gpu_log(tmp_path / "gpus.csv", ["0"])
    assert asked.wait(10)
    started = time.monotonic()
    log.close()
    assert time.monotonic() - started < 10
    (record,) = caplog.records
    assert record.getMessage() == "NVML has not answered for 0.05 s: left behind"
    answer.set()
    log._thread.join(10)


def test_a_card_is_asked_for_its_name(driver):
    driver.names = ["NVIDIA A", "NVIDIA B"]
    assert gpu_name(["1", "0"]) == "NVIDIA B"
    assert gpu_name(["GPU-0"]) == "NVIDIA A"
    assert gpu_name([]) == ""


def test_a_line_has_the_columns_of_the_header():
    at = datetime(2026, 11, 28, 20, 0, 1, 250_999)
    h200 = Device(None, 1, "NVIDIA H200")
    assert csv_line(at, h200, 80, 1024 * 2**20) == (
        "2026/11/28 20:00:01.250, 1, NVIDIA H200, 80, 1024"
    )
    assert csv_line(at, h200, None, None) == "2026/11/28 20:00:01.250, 1, NVIDIA H200, , "
    samples = parse([HEADER, csv_line(at, h200, None, None), csv_line(at, h200, 0, 0)])
    assert [(s.utilization, s.memory_gib) for s in samples] == [(None, None), (0.0, 0.0)]


def test_gpus_of_several_nodes_are_told_apart(tmp_path, driver, monkeypatch):
    """Two nodes have a GPU 0 each; the page shows each node, and older files are still read."""
    monkeypatch.setattr(gpus, "INTERVAL_S", 60.0)
    takes = []
    folder = tmp_path / "run"
    folder.mkdir()
    tracking = TrackingConfig(backends=[])
    with Tracker(folder, tracking, {}, {}, num_steps=1, node_gpus=takes.append) as tracker:
        (take,) = takes
        for node in ("10.0.0.1", "10.0.0.2"):
            source = gpu_source(["0"])
            lines = []
            _wait_for(lambda source=source, lines=lines: lines.extend(source()) or lines)
            take(node, lines)
        tracker.log(1, {"time/step": 1.0})
    take("10.0.0.1", lines)  # after the end
    text = (folder / "gpus.csv").read_text().splitlines()
    assert text[0] == NODE_HEADER and len(text) == 3
    samples = read_gpus(folder / "gpus.csv")
    assert [(s.node, s.gpu, s.utilization) for s in samples] == [
        ("10.0.0.1", 0, 0.8),
        ("10.0.0.2", 0, 1.0),
    ]
    (row,) = read_jsonl(folder / "metrics.jsonl")
    assert row["gpu/utilization"] == pytest.approx(0.9)
    line = timeline(samples[::-1], lambda sample: sample.utilization)
    assert (line.lowest, line.highest) == ([0.8], [1.0])
    page = (folder / "report.html").read_text()
    assert "The same, mean of each node" in page and "10.0.0.2" in page
    assert [sample.node for sample in parse(LINES)] == [""] * 4


def test_a_node_without_a_driver_samples_nothing(driver, caplog):
    driver.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    source = gpu_source(["0"])
    assert gpu_source([])() == [] and source() == []
    assert not caplog.records


def test_lines_that_are_no_sample_are_left_out():
    samples = parse(LINES)
    assert [(sample.gpu, sample.utilization, sample.memory_gib) for sample in samples] == [
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
    cut = "\0" * 9 + LINES[1][9:]  # by a power cut
    (tmp_path / "gpus.csv").write_bytes(f"{whole}\n{cut}\n".encode() + b"\xc3\0\n")
    assert len(read_gpus(tmp_path / "gpus.csv")) == 1


def test_a_timeline_has_each_second_and_in_a_long_run_means():
    line = timeline(parse(LINES), lambda sample: sample.memory_gib)
    assert line.seconds == [0, 1]
    assert (line.lowest, line.mean, line.highest) == ([1, 2], [1.5, 2.5], [2, 3])
    busy = timeline(parse(LINES), lambda sample: sample.utilization)
    assert busy.lowest == [0.4, 1.0]
    long = [
        f"2026/11/28 {10 + i // 3600}:{i // 60 % 60:02}:{i % 60:02}.000, 0, X, {i % 2 * 100}, 1"
        for i in range(4000)
    ]
    line = timeline(parse(long), lambda sample: sample.utilization, points=100)
    assert len(line.seconds) <= 101
    assert line.mean[50] == pytest.approx(0.5, abs=0.02)
    assert timeline([], lambda sample: sample.utilization).seconds == []
