"""Host memory of this machine or container, and processes killed for lack of it."""

import re
from pathlib import Path

import psutil

GIB = 2**30
_CGROUPS = {
    "limit": ("memory.max", "memory/memory.limit_in_bytes"),
    "used": ("memory.current", "memory/memory.usage_in_bytes"),
    "kills": ("memory.events", "memory/memory.oom_control"),
}
"""Files of a container, in cgroup 2 and in cgroup 1."""


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for lack of memory since it started.

    Counted in this container, or on this machine where the kernel has no count of the container.
    """
    texts = [_read(root / "sys/fs/cgroup", _CGROUPS["kills"]), _text(root / "proc/vmstat")]
    counts = [re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts]
    return max((int(count[1]) for count in counts if count), default=0)


def describe_memory(root: Path = Path("/")) -> str:
    """``12.3 of 24.0 GiB of memory are in use``, by `_memory`."""
    used, limit = _memory(root)
    return f"{used / GIB:.1f} of {limit / GIB:.1f} GiB of memory are in use"


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that the container may use, or the machine has where the container has no limit."""
    return _memory(root)[1]


def _memory(root: Path) -> tuple[int, int]:
    """Bytes in use and in total: of the container if it has a limit, else of the machine."""
    machine = psutil.virtual_memory()
    folder = root / "sys/fs/cgroup"
    container = {name: _read(folder, _CGROUPS[name]).strip() for name in ("used", "limit")}
    if all(map(str.isdecimal, container.values())) and int(container["limit"]) < machine.total:
        return int(container["used"]), int(container["limit"])
    return machine.total - machine.available, machine.total


def describe_kill(kills: int, memory: str) -> str:
    """The likely cause, where a process was killed and left no error.

    Args:
        kills: processes that the kernel has killed for lack of memory meanwhile
        memory: see `describe_memory`
    """
    if kills:
        return (
            f"The kernel killed {kills} process{'es' * (kills > 1)} for lack of memory meanwhile; "
            f"{memory}. Lower policy.max_tokens_per_micro_batch, rollout.kv_cache_gib or the "
            "number of ranks, or use a machine with more memory [RL4011]"
        )
    return f"It ran out of memory perhaps ({memory}): see the kernel's log (dmesg)"


def _read(folder: Path, names: tuple[str, ...]) -> str:
    return next(filter(None, (_text(folder / name) for name in names)), "")


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""
