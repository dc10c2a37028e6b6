"""What each process of a run holds, seen from outside: by role, and of the whole run."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

Sample = Mapping[str, Mapping[str, float]]
"""By role, by what is measured."""
RUN = "run"
"""The role of what no one process holds."""

_ROLES = (
    (re.compile(r"^ray::(\w+)"), None),
    (re.compile(r"EngineCore"), "EngineCore"),
    (re.compile(r"/raylet/raylet"), "raylet"),
    (re.compile(r"/gcs/gcs_server"), "gcs"),
    (re.compile(r"rltrain\.(?:environments|actors)\.(\w+)"), None),
    (re.compile(r"multiprocessing\.(\w+) import"), None),
    (re.compile(r"/ray/_private/(\w+)\.py|/ray/(?:dashboard|autoscaler/_private)/(\w+)\.py"), None),
)
_LOCAL = re.compile(r"- num local plasma objects: (\d+)")
_PINNED = re.compile(r"- pinned objects size: (\d+)")


class Watcher:
    """Takes samples of the run whose driver has this process id.

    Args:
        temporary: the folder that is TMPDIR to it, and to nobody else
    """

    def __init__(self, pid: int, temporary: Path) -> None:
        self.driver = psutil.Process(pid)
        self.temporary = temporary
        self._names: dict[int, str] = {pid: "driver"}

    def sample(self) -> Sample:
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for process in [self.driver, *self.driver.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
                for name, value in measure(process).items():
                    found[self._role(process)][name] += value
        found[RUN] = self._of_the_run()
        return found

    def _role(self, process: psutil.Process) -> str:
        if process.pid not in self._names:
            role = role_of(" ".join(process.cmdline()), process.name())
            if role.endswith("Actor"):  # the policy's ranks and the critic's
                number = sum(name.startswith(role) for name in self._names.values())
                role = f"{role} {number}"
            self._names[process.pid] = role
        return self._names[process.pid]

    def _of_the_run(self) -> dict[str, float]:
        shared = Path(f"/proc/{self.driver.pid}/root/dev/shm")
        files = [entry for entry in os.scandir(shared) if entry.is_file(follow_symlinks=False)]
        below = sum(len(names) for _, *both in os.walk(self.temporary) for names in both)
        return {
            "shm_entries": len(files),
            "shm_bytes": sum(_allocated(entry) for entry in files),
            "tmp_entries": below,
            "tmp_top_entries": len(os.listdir(self.temporary)),
            **objects(self.temporary),
        }


def measure(process: psutil.Process) -> dict[str, float]:
    return {
        "uss_bytes": process.memory_full_info().uss,
        "handles": process.num_fds(),
        "threads": process.num_threads(),
        "processes": 1,
    }


def role_of(command: str, name: str) -> str:
    """What a process is to the run, by its command line."""
    for pattern, role in _ROLES:
        if match := pattern.search(command):
            return role or next(group for group in match.groups() if group)
    return name


def objects(temporary: Path) -> dict[str, float]:
    """What the raylet says of its object store, at most ten seconds ago; nothing before it did."""
    for path in _debug_states(temporary):
        text = path.read_text(errors="replace")
        local, pinned = _LOCAL.search(text), _PINNED.search(text)
        if local and pinned:
            return {"ray_objects": float(local[1]), "ray_pinned_bytes": float(pinned[1])}
    return {}


def _debug_states(temporary: Path) -> Iterator[Path]:
    yield from temporary.glob("ray/session_2*/logs/debug_state.txt")
    yield from temporary.glob("*/ray/session_2*/logs/debug_state.txt")


def _allocated(entry: os.DirEntry[str]) -> int:
    """Bytes of memory: a file of /dev/shm may be a hole for the most part."""
    with suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_blocks * 512
    return 0
