"""What the machine must have, each check with a value that is too little."""

import os
import resource
import socket
import subprocess
import sys
from types import SimpleNamespace

import pynvml
import pytest

from rltrain.controller.doctor import gpu_checks, machine, measured
from rltrain.controller.doctor.findings import State
from rltrain.tracking.gpu_health import GpuHost, GpuState, read_gpu_host

GIB = 2**30
H200 = GpuState(0, "NVIDIA H200", 140 * GIB, 1 * GIB)


@pytest.mark.parametrize(
    ("finding", "state", "said"),
    [
        (machine.check_cores(8, None), State.OK, "8 cores"),
        (machine.check_cores(8, 1.5), State.WARN, "limited to 1.5"),
        (machine.check_cores(1, None), State.WARN, "1 cores"),
        (machine.check_memory(20 * GIB, 24 * GIB), State.OK, "20.00 GiB of 24.00 GiB"),
        (machine.check_memory(5 * GIB, 24 * GIB), State.WARN, "the demo needs"),
        (machine.check_memory(2 * GIB, 24 * GIB), State.FAIL, "the smallest run needs"),
        (machine.check_shared_memory(2 * GIB), State.OK, "2.00 GiB free"),
        (machine.check_shared_memory(64 * 2**20), State.WARN, "0.06 GiB free"),
        (machine.check_shared_memory(None), State.FAIL, "found none"),
        (machine.check_open_files(65536, 65536), State.OK, "65536"),
        (machine.check_open_files(1024, 65536), State.WARN, "Ray may run out"),
        (machine.check_locale("UTF-8"), State.OK, "UTF-8"),
        (machine.check_locale("ANSI_X3.4-1968"), State.WARN, "expected UTF-8"),
        (machine.check_clock(2e9, 1.9e9), State.OK, "not before"),
        (machine.check_clock(0.0, 1.9e9), State.WARN, "days before"),
        (machine.check_temporary_path("/tmp"), State.OK, "/tmp"),
        (machine.check_temporary_path("/" + "x" * 33), State.OK, "/xx"),
        (machine.check_temporary_path("/" + "x" * 34), State.WARN, "35 characters"),
        (machine.check_temporary_path("/" + "x" * 40), State.FAIL, "41 characters"),
        (machine.check_loopback("Connection refused"), State.FAIL, "Connection refused"),
    ],
)
def test_values_and_what_they_mean(finding, state, said):
    assert finding.state is state and said in finding.found


def test_a_limit_that_cannot_be_raised_asks_for_help():
    assert machine.check_open_files(1024, 1024).remedy.startswith("ask")
    assert machine.check_open_files(1024, resource.RLIM_INFINITY).remedy == "ulimit -n 4096"


@pytest.mark.parametrize(
    ("free", "state"), [(3 * GIB, State.OK), (GIB, State.WARN), (GIB // 10, State.FAIL)]
)
def test_disk(free, state):
    folder = machine.FolderState("/data", free)
    finding = machine.check_folder("output", folder, 2 * GIB, "trainer.output_dir")
    assert finding.state is state and "/data" in finding.found


def test_folders_are_measured_where_they_would_be_made(tmp_path):
    state = measured.folder_state(str(tmp_path / "a" / "b"))
    assert state.free > 0 and not state.error and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below", "/proc/rltrain"):  # where even root cannot write
        state = measured.folder_state(str(path))
        finding = machine.check_folder("output", state, GIB, "trainer.output_dir")
        assert finding.state is State.FAIL and "cannot be written" in finding.found
        assert "trainer.output_dir" in finding.remedy


def test_a_process_that_may_write_nothing_says_so(tmp_path):
    """A full disk, as this process sees it: no file may grow."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "from rltrain.controller.doctor.measured import folder_state\n"
        f"print(folder_state({str(tmp_path)!r}).error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "File too large"


def test_loopback_is_tried_for_real(monkeypatch):
    assert measured.loopback_error() == ""

    def refuse(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert "Connection refused" in measured.loopback_error()


def test_a_proxy_that_would_take_local_connections():
    assert list(machine.check_proxy({})) == []
    [finding] = machine.check_proxy({"https_proxy": "http://proxy:3128"})
    assert finding.state is State.WARN and "proxy:3128" not in finding.found
    assert list(machine.check_proxy({"http_proxy": "x", "no_proxy": "a,127.0.0.1"})) == []


def test_the_quota_of_a_container(tmp_path):
    assert measured.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert measured.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert measured.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000")
    assert measured.cpu_quota(tmp_path) == 0.5


@pytest.mark.parametrize(
    ("gpus", "files", "state", "said"),
    [
        ([], 0, State.NOT_APPLICABLE, "none on this machine"),
        ([], 2, State.FAIL, "NVML lists no GPU"),
        ([H200], 0, State.WARN, "may use none"),
        ([H200], 1, State.OK, "139.00 GiB of 140.00 GiB free"),
        (
            [GpuState(0, "H", 80 * GIB, 60 * GIB, ((4711, 59 * GIB),))],
            1,
            State.WARN,
            "process 4711 (59.00 GiB)",
        ),
        ([GpuState(0, "H", 80 * GIB, 0, mig=True)], 1, State.WARN, "MIG"),
        ([GpuState(0, "H", 80 * GIB, 0, ecc_errors=3)], 1, State.FAIL, "3 memory errors"),
        ([GpuState(0, "H", 80 * GIB, 0, ecc_errors=0)], 1, State.OK, "free"),
        ([GpuState(0, "H", 80 * GIB, 0, exclusive=True)], 1, State.FAIL, "exclusive"),
    ],
)
def test_gpus(gpus, files, state, said):
    finding = next(iter(gpu_checks.check_gpus(gpus, files)))
    assert finding.state is state and said in finding.found


def test_peers():
    assert gpu_checks.check_peers([], 1, "2.28.9").state is State.NOT_APPLICABLE
    assert gpu_checks.check_peers([], 2, "2.28.9").state is State.OK
    assert gpu_checks.check_peers([], 2, None).state is State.FAIL
    blocked = gpu_checks.check_peers([(0, 3)], 4, "2.28.9")
    assert blocked.state is State.WARN and "0-3" in blocked.found


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="a machine without a driver")
def test_without_a_driver_there_is_no_gpu():
    assert read_gpu_host() == GpuHost()


def test_what_the_driver_says_of_each_gpu(monkeypatch):
    """Two GPUs: one is shared, divided and cannot reach the other; the other has no ECC."""

    def unsupported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "Init": lambda: None,
        "DeviceGetCount": lambda: 2,
        "DeviceGetHandleByIndex": lambda index: index,
        "DeviceGetName": lambda handle: f"GPU {handle}",
        "DeviceGetMemoryInfo": lambda handle, version: SimpleNamespace(total=80, used=handle),
        "DeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=7, usedGpuMemory=None)
        ][handle:],
        "DeviceGetMigMode": lambda handle: unsupported() if handle else (1, 1),
        "DeviceGetTotalEccErrors": lambda handle, *_: unsupported() if handle else 0,
        "DeviceGetComputeMode": lambda handle: 3 * handle,
        "DeviceGetP2PStatus": lambda a, b, index: 1 if (a, b, index) == (0, 1, 0) else 0,
        "SystemGetDriverVersion": lambda: "580.65",
        "SystemGetCudaDriverVersion": lambda: 13000,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    assert read_gpu_host() == GpuHost(
        (
            GpuState(0, "GPU 0", 80, 0, ((7, 0),), mig=True, ecc_errors=0),
            GpuState(1, "GPU 1", 80, 1, exclusive=True),
        ),
        "580.65",
        13000,
        ((0, 1),),
    )
