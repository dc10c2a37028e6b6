"""The state of every GPU before a run, as NVML knows it: who uses it, and what is wrong with it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pynvml

from rltrain.tracking.gpus import NO_DRIVER, UNSUPPORTED

P2P_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which pynvml defines as a tuple by mistake."""


@dataclass(frozen=True)
class GpuState:
    """What NVML says of one GPU."""

    index: int
    name: str
    total: int
    """Bytes."""
    used: int
    """Bytes, of all processes."""
    processes: tuple[tuple[int, int], ...] = ()
    """Process id and bytes, of each process that computes there."""
    mig: bool = False
    ecc_errors: int | None = None
    """Uncorrected since the driver was loaded; None without ECC."""
    exclusive: bool = False
    """At most one process may use it."""


@dataclass(frozen=True)
class GpuHost:
    """All GPUs of this machine, whatever CUDA_VISIBLE_DEVICES says."""

    gpus: tuple[GpuState, ...] = ()
    driver: str = ""
    cuda: int | None = None
    """Newest CUDA that the driver can run, 13000 for 13.0; None without a driver."""
    blocked: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that cannot read each other's memory."""


def read_gpu_host() -> GpuHost:
    """Raises NVMLError where the driver is there and fails."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in NO_DRIVER:
            return GpuHost()
        raise
    handles = [
        pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
    ]
    return GpuHost(
        tuple(_read_gpu(index, handle) for index, handle in enumerate(handles)),
        pynvml.nvmlSystemGetDriverVersion(),
        pynvml.nvmlSystemGetCudaDriverVersion(),
        tuple(
            (a, b)
            for a, b in combinations(range(len(handles)), 2)
            if _is_blocked(handles[a], handles[b])
        ),
    )


def _read_gpu(index: int, handle: Any) -> GpuState:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    processes = _supported(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    return GpuState(
        index,
        pynvml.nvmlDeviceGetName(handle),
        memory.total,
        memory.used,
        tuple((process.pid, process.usedGpuMemory or 0) for process in processes),
        mig=_supported(
            lambda: pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE, False
        ),
        ecc_errors=_supported(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            ),
            None,
        ),
        exclusive=_supported(
            lambda: (
                pynvml.nvmlDeviceGetComputeMode(handle) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
            ),
            False,
        ),
    )


def _is_blocked(first: Any, second: Any) -> bool:
    def status() -> int:
        return int(pynvml.nvmlDeviceGetP2PStatus(first, second, P2P_READ))

    return _supported(status, pynvml.NVML_P2P_STATUS_OK) != pynvml.NVML_P2P_STATUS_OK


def _supported(read: Callable[[], Any], otherwise: Any) -> Any:
    """What ``read`` returns, or ``otherwise`` where this GPU or driver does not have it."""
    try:
        return read()
    except pynvml.NVMLError as error:
        if error.value not in UNSUPPORTED:
            raise
        return otherwise
