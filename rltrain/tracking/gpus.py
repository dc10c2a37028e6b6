"""What nvidia-smi says of the GPUs while a run goes on: gpus.csv of its folder.

Utilization is the share of a second in which some kernel ran. A GPU can be busy and slow.
"""

import csv
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from threading import Thread

FIELDS = ("timestamp", "index", "name", "utilization.gpu", "memory.used")
TIME = "%Y/%m/%d %H:%M:%S.%f"


@dataclass(frozen=True)
class GpuSample:
    """One GPU in one second; None where the driver does not say."""

    time: datetime
    gpu: int
    name: str
    utilization: float | None  # 0 to 1
    memory_gib: float | None


class GpuLog:
    """Copies one line a second and GPU to a file, for as long as this process lives.

    Args:
        gpus: what nvidia-smi calls those to watch, by number or UUID; none: all that it sees
    """

    def __init__(self, path: Path, gpus: Sequence[str] = ()) -> None:
        command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,nounits"]
        command += ["--loop=1", *([f"--id={','.join(gpus)}"] if gpus else [])]
        # When this process is killed, the pipe breaks and nvidia-smi ends, too.
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._new: deque[str] = deque()
        self._thread = Thread(target=self._copy, args=(path,), daemon=True)
        self._thread.start()

    def _copy(self, path: Path) -> None:
        assert self._process.stdout is not None
        with path.open("w", encoding="utf-8") as file:
            for line in self._process.stdout:
                file.write(line)
                file.flush()
                self._new.append(line)

    def metrics(self) -> dict[str, float]:
        """The ``gpu/`` metrics since the last call; empty where nothing was sampled."""
        return gpu_metrics(parse([self._new.popleft() for _ in range(len(self._new))]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()


def name_of(gpus: Sequence[str]) -> str:
    """The name of the first of these GPUs; empty where there is none or nvidia-smi does not say."""
    if not gpus or not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={gpus[0]}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except subprocess.SubprocessError:  # a run does not end because its card has no name
        return ""
    return done.stdout.strip()


def start_gpu_log(path: Path, gpus: Sequence[str]) -> GpuLog | None:
    """None where there are no GPUs to watch, or no nvidia-smi to ask."""
    return GpuLog(path, gpus) if gpus and shutil.which("nvidia-smi") else None


def read_gpus(path: Path) -> list[GpuSample]:
    """Of a gpus.csv; none when there is no such file."""
    if not path.is_file():
        return []
    # What follows the last newline was torn by a kill.
    return parse(path.read_text(encoding="utf-8").split("\n")[:-1])


def parse(lines: Iterable[str]) -> list[GpuSample]:
    """Leaves out what is no sample: the header, and what nvidia-smi says of a GPU that was lost."""
    samples = []
    for row in csv.reader(lines, skipinitialspace=True):
        if len(row) != len(FIELDS) or not row[1].isdigit():
            continue
        utilization, used = (float(cell) if cell.isdigit() else None for cell in row[3:])
        samples.append(
            GpuSample(
                datetime.strptime(row[0], TIME),
                int(row[1]),
                row[2],
                None if utilization is None else utilization / 100,
                None if used is None else used / 1024,  # nvidia-smi's MiB
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
    """At most so many points, evenly spaced; none where nothing was sampled."""
    found = [(each, x) for each in samples if (x := value(each)) is not None]
    line = Timeline([], [], [], [])
    if not found:
        return line
    first, last = found[0][0].time, found[-1][0].time
    width = max(1.0, (last - first).total_seconds() / points)
    bins: dict[int, dict[int, list[float]]] = {}
    for each, x in found:
        at = int((each.time - first).total_seconds() / width)
        bins.setdefault(at, {}).setdefault(each.gpu, []).append(x)
    for at, gpus in sorted(bins.items()):
        means = [fmean(xs) for xs in gpus.values()]
        line.seconds.append(at * width)
        line.lowest.append(min(means))
        line.mean.append(fmean(means))
        line.highest.append(max(means))
    return line


def gpu_metrics(samples: Sequence[GpuSample]) -> dict[str, float]:
    busy = [each.utilization for each in samples if each.utilization is not None]
    used = [each.memory_gib for each in samples if each.memory_gib is not None]
    return {
        **({"gpu/utilization": fmean(busy)} if busy else {}),
        **({"gpu/memory_gib": max(used)} if used else {}),
    }
