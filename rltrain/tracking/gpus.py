"""The GPUs of a run while it goes on, sampled through NVML: gpus.csv of its folder.

Utilization is the share of a second in which some kernel ran. A GPU can be busy and slow.
"""

import csv
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from threading import Event, Lock, Thread
from time import sleep
from typing import Any

import pynvml

logger = logging.getLogger(__name__)

HEADER = "timestamp, index, name, utilization.gpu [%], memory.used [MiB]"
NODE_HEADER = f"{HEADER}, node"
"""Of a run in a cluster: there the lines end in the address of the node."""
NUM_COLUMNS = HEADER.count(",") + 1
TIME = "%Y/%m/%d %H:%M:%S.%f"
INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 10.0
"""How long a tracker that closes waits for a driver that does not answer."""
NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
UNSUPPORTED = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)


@dataclass(frozen=True)
class GpuSample:
    """One GPU in one second; None where the driver does not say."""

    time: datetime
    gpu: int
    name: str
    utilization: float | None  # 0 to 1
    memory_gib: float | None
    node: str = ""  # its address, where a run has joined a cluster


@dataclass(frozen=True)
class Device:
    """A GPU as NVML knows it."""

    handle: Any
    index: int
    name: str


class GpuLog:
    """A thread that writes one line per second and GPU to a file, until it is closed.

    Args:
        devices: from an initialised NVML, which stays so until the process ends
    """

    def __init__(self, path: Path, devices: Sequence[Device]) -> None:
        self._new: deque[str] = deque()
        self._stop = Event()
        self._thread = Thread(target=self._sample, args=(path, devices), daemon=True)
        self._thread.start()

    def _sample(self, path: Path, devices: Sequence[Device]) -> None:
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write(f"{HEADER}\n")
                while not self._stop.is_set():
                    for device in devices:
                        line = read_line(device)
                        file.write(f"{line}\n")
                        self._new.append(line)
                    file.flush()
                    self._stop.wait(INTERVAL_S)
        except (pynvml.NVMLError, OSError) as error:  # a run goes on without these figures
            logger.warning("%s has no GPU figures from here on: %s", path, error)

    def metrics(self) -> dict[str, float]:
        """The ``gpu/`` metrics since the last call; empty where nothing was sampled."""
        return gpu_metrics(parse([self._new.popleft() for _ in range(len(self._new))]))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("NVML has not answered for %g s: left behind", CLOSE_TIMEOUT_S)


Listen = Callable[[Callable[[str, Sequence[str]], None]], None]


class NodeGpuLog:
    """Writes what the nodes of a cluster sample, as it comes.

    Args:
        listen: calls its argument from now on with a node and the new lines of that node, see
            `gpu_source`; from another thread
    """

    def __init__(self, path: Path, listen: Listen) -> None:
        self._new: deque[str] = deque()
        self._lock = Lock()
        self._file = path.open("w", encoding="utf-8")
        self._file.write(f"{NODE_HEADER}\n")
        listen(self.add)

    def add(self, node: str, lines: Sequence[str]) -> None:
        marked = [f"{line}, {node}" for line in lines]
        with self._lock:
            if not self._file.closed:
                self._file.write("".join(f"{line}\n" for line in marked))
                self._file.flush()
                self._new.extend(marked)

    def metrics(self) -> dict[str, float]:
        """As `GpuLog.metrics`."""
        return gpu_metrics(parse([self._new.popleft() for _ in range(len(self._new))]))

    def close(self) -> None:
        with self._lock:
            self._file.close()


def gpu_source(gpus: Sequence[str]) -> Callable[[], list[str]]:
    """Sample these GPUs of this machine each second, in a thread: a driver may hang.

    Args:
        gpus: as in `start_gpu_log`

    Returns:
        A function that returns the lines since its last call.
    """
    new: deque[str] = deque()

    def sample() -> None:
        try:
            pynvml.nvmlInit()
            devices = [find_device(gpu) for gpu in gpus]
            while True:
                new.extend([read_line(device) for device in devices])
                sleep(INTERVAL_S)
        except pynvml.NVMLError as error:  # a run goes on without these figures
            if error.value not in NO_DRIVER:
                logger.warning("GPUs %s are not sampled any more: %s", ",".join(gpus), error)

    if gpus:
        Thread(target=sample, daemon=True).start()
    return lambda: [new.popleft() for _ in range(len(new))]


def gpu_name(gpus: Sequence[str]) -> str:
    """The name of the first of these GPUs; empty where there is none or the driver does not say."""
    if not gpus:
        return ""
    try:
        pynvml.nvmlInit()
        return find_device(gpus[0]).name
    except pynvml.NVMLError:  # a run does not end because its card has no name
        return ""


def start_gpu_log(path: Path, gpus: Sequence[str]) -> GpuLog | None:
    """Sample these GPUs into ``path``; None where there are none, or no driver to ask.

    Args:
        gpus: by number, as nvidia-smi counts, or by UUID
    """
    if not gpus:
        return None
    try:
        pynvml.nvmlInit()
        return GpuLog(path, [find_device(gpu) for gpu in gpus])
    except pynvml.NVMLError as error:
        if error.value not in NO_DRIVER:
            logger.warning("GPUs %s are not sampled: %s", ",".join(gpus), error)
        return None


def find_device(gpu: str) -> Device:
    """Raises NVMLError where NVML does not know the number or UUID."""
    if gpu.isdigit():
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    else:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
    return Device(handle, pynvml.nvmlDeviceGetIndex(handle), pynvml.nvmlDeviceGetName(handle))


def read_line(device: Device) -> str:
    """Raises NVMLError where the driver fails; a figure that the GPU does not have is empty."""
    rates = _supported(lambda: pynvml.nvmlDeviceGetUtilizationRates(device.handle))
    # Version 2 counts what is in use without what the driver reserves, as nvidia-smi does.
    memory = _supported(
        lambda: pynvml.nvmlDeviceGetMemoryInfo(device.handle, version=pynvml.nvmlMemory_v2)
    )
    return csv_line(
        datetime.now(),
        device,
        None if rates is None else rates.gpu,
        None if memory is None else memory.used,
    )


def _supported(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except pynvml.NVMLError as error:
        if error.value not in UNSUPPORTED:
            raise
        return None


def csv_line(time: datetime, device: Device, percent: int | None, used_bytes: int | None) -> str:
    """One line of gpus.csv, in the columns of ``HEADER``."""
    cells = (
        time.strftime(TIME)[:-3],  # milliseconds
        device.index,
        device.name,
        "" if percent is None else percent,
        "" if used_bytes is None else used_bytes // 2**20,
    )
    return ", ".join(map(str, cells))


def read_gpus(path: Path) -> list[GpuSample]:
    """Of a gpus.csv; none when there is no such file."""
    if not path.is_file():
        return []
    # What follows the last newline is torn. A power cut may leave bytes that are no text.
    return parse(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1])


def parse(lines: Iterable[str]) -> list[GpuSample]:
    """The samples of these lines of a gpus.csv; the header and torn lines are left out."""
    samples = []
    for row in csv.reader(lines, skipinitialspace=True):
        if len(row) not in (NUM_COLUMNS, NUM_COLUMNS + 1) or not row[1].isdigit():
            continue
        try:
            time = datetime.strptime(row[0], TIME)
        except ValueError:
            continue
        utilization, used_mib = (float(cell) if cell.isdigit() else None for cell in row[3:5])
        samples.append(
            GpuSample(
                time,
                int(row[1]),
                row[2],
                None if utilization is None else utilization / 100,
                None if used_mib is None else used_mib / 1024,
                row[5] if len(row) > NUM_COLUMNS else "",
            )
        )
    return samples


@dataclass(frozen=True)
class Timeline:
    """One quantity over a run; means of a GPU's samples where those are many."""

    seconds: list[float]  # since the first sample
    lowest: list[float]  # of the GPUs
    mean: list[float]
    highest: list[float]


def timeline(
    samples: Sequence[GpuSample], value: Callable[[GpuSample], float | None], points: int = 240
) -> Timeline:
    """At most ``points`` points, evenly spaced; none where nothing was sampled."""
    measured = [(sample, x) for sample in samples if (x := value(sample)) is not None]
    line = Timeline([], [], [], [])
    if not measured:
        return line
    times = [sample.time for sample, _ in measured]  # in order on each node, not over all
    first, last = min(times), max(times)
    width = max(1.0, (last - first).total_seconds() / points)
    bins: dict[int, dict[tuple[str, int], list[float]]] = {}
    for sample, x in measured:
        number = int((sample.time - first).total_seconds() / width)
        bins.setdefault(number, {}).setdefault((sample.node, sample.gpu), []).append(x)
    for number, gpus in sorted(bins.items()):
        means = [fmean(xs) for xs in gpus.values()]
        line.seconds.append(number * width)
        line.lowest.append(min(means))
        line.mean.append(fmean(means))
        line.highest.append(max(means))
    return line


def gpu_metrics(samples: Sequence[GpuSample]) -> dict[str, float]:
    """Mean utilization and most memory in use; a figure that no sample has is left out."""
    busy = [sample.utilization for sample in samples if sample.utilization is not None]
    used = [sample.memory_gib for sample in samples if sample.memory_gib is not None]
    return {
        **({"gpu/utilization": fmean(busy)} if busy else {}),
        **({"gpu/memory_gib": max(used)} if used else {}),
    }
