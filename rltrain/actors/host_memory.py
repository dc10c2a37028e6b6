"""How much memory this machine has for us, and whether the kernel has killed for lack of it."""

import re
from pathlib import Path

import psutil

GIB = 2**30
_CGROUPS = {
    "limit": ("memory.max", "memory/memory.limit_in_bytes"),
    "used": ("memory.current", "memory/memory.usage_in_bytes"),
    "kills": ("memory.events", "memory/memory.oom_control"),
}
"""Of a container: the files of cgroup 2 and of cgroup 1."""


def oom_kills(root: Path = Path("/")) -> int:
    """Processes that the kernel has killed for lack of memory since it started, in this container
    or, where the kernel counts all, on this machine."""
    texts = [_read(root / "sys/fs/cgroup", _CGROUPS["kills"]), _text(root / "proc/vmstat")]
    counts = [re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts]
    return max((int(count[1]) for count in counts if count), default=0)


def describe_memory(root: Path = Path("/")) -> str:
    """``12.3 of 24.0 GiB of memory are in use``: of the container, where it has a limit."""
    used, limit = _memory(root)
    return f"{used / GIB:.1f} of {limit / GIB:.1f} GiB of memory are in use"


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes: of the container, where it has a limit, else of the machine."""
    return _memory(root)[1]


def _memory(root: Path) -> tuple[int, int]:
    """Bytes in use, and there are."""
    machine = psutil.virtual_memory()
    folder = root / "sys/fs/cgroup"
    own = {name: _read(folder, _CGROUPS[name]).strip() for name in ("used", "limit")}
    if all(map(str.isdecimal, own.values())) and int(own["limit"]) < machine.total:
        return int(own["used"]), int(own["limit"])
    return machine.total - machine.available, machine.total


def describe_kill(kills: int, now: str) -> str:
    """What is known of a process that was killed and left no error.

    Args:
        kills: processes that the kernel has killed for lack of memory meanwhile
        now: see `describe_memory`
    """
    if kills:
        return (
            f"The kernel killed {kills} process{'es' * (kills > 1)} for lack of memory meanwhile; "
            f"{now}. Lower policy.max_tokens_per_micro_batch, rollout.kv_cache_gib or the number "
            "of ranks, or use a machine with more memory"
        )
    return f"It ran out of memory perhaps ({now}): see the kernel's log (dmesg)"


def _read(folder: Path, names: tuple[str, ...]) -> str:
    return next(filter(None, (_text(folder / name) for name in names)), "")


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""
