"""The processes below a process, however they were started, and how they end. Linux only.

A process that leaves its session, or whose parent has ended, is still below a process that adopts
orphans. So nothing that a reward function starts can leave the tree of its supervisor.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PAUSE_S = 0.002


def adopt_orphans() -> None:
    """From now on this process is the parent of descendants whose parent ends, instead of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def request_signal_at_end_of_parent(number: signal.Signals) -> None:
    """Have the kernel send this signal when the thread that started this process ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def descendants(root: int) -> list[int]:
    """Processes below ``root`` that have not ended. A zombie has."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        children = [pid for pid in _children(waiting.pop()) if _is_alive(pid)]
        found += children
        waiting += children
    return found


def kill_descendants(root: int, timeout_s: float) -> list[int]:
    """Kill all processes below ``root``, and those that they start meanwhile.

    Returns:
        those that did not end within ``timeout_s``, since the kernel keeps them
    """
    deadline = time.monotonic() + timeout_s
    while living := descendants(root):
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return living
        time.sleep(PAUSE_S)
    return []


def _children(pid: int) -> list[int]:
    """Of all threads of a process, zombies too."""
    if not os.path.exists("/proc/thread-self/children"):  # the kernel has no CONFIG_PROC_CHILDREN
        return _children_by_search(pid)
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            path = f"/proc/{pid}/task/{thread}/children"
            with suppress(FileNotFoundError, ProcessLookupError), open(path, "rb") as file:
                children += map(int, file.read().split())
    return children


def _children_by_search(parent: int) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _state(pid)[1:2] == [b"%d" % parent]]


def _is_alive(pid: int) -> bool:
    """A process whose main thread alone has ended looks like a zombie, and has other threads."""
    if (state := _state(pid)[:1]) and state[0] in b"ZX":
        with suppress(FileNotFoundError, ProcessLookupError):
            return len(os.listdir(f"/proc/{pid}/task")) > 1
        return False
    return bool(state)


def _state(pid: int) -> list[bytes]:
    """State, parent and further fields of ``/proc/PID/stat``; empty for no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
