"""Bytes that processes of one node share on CPUs.

They are in memory that has no name in any file system (memfd). Others open it through
``/proc/PID/fd/N`` of the process that made it. So the size of ``/dev/shm`` does not limit it, and
the kernel frees it when the last process that has it open ends, however it ends.

The first page says which bucket lies behind it. Only one process writes.
"""

import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

HEADER = 4096
"""Bytes before the data: the number of the bucket, or -1."""
POLL_S = 0.0005
_INT64 = 8


class NodeMemory:
    """One slot, in the process that fills it: by `write`, or in `mapped` followed by `mark`."""

    def __init__(self) -> None:
        self._file = os.memfd_create("rltrain-weights")
        weakref.finalize(self, os.close, self._file)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.clear()

    def mapped(self, nbytes: int) -> Tensor:
        """The data as a tensor, uint8 ``[nbytes]``. The memory keeps this size."""
        os.ftruncate(self._file, HEADER + nbytes)
        mapping = mmap.mmap(self._file, HEADER + nbytes)
        return torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER, count=nbytes)

    def write(self, buffer: Tensor, number: int) -> None:
        """Put bucket ``number`` there.  # uint8 [nbytes]"""
        _whole(os.pwritev, self._file, buffer)
        self.mark(number)

    def mark(self, number: int) -> None:
        """Say that the bytes of bucket ``number`` are in place."""
        os.pwrite(self._file, number.to_bytes(_INT64, "little", signed=True), 0)

    def clear(self) -> None:
        """Give the memory back. Nothing may be mapped."""
        os.ftruncate(self._file, HEADER)
        self.mark(-1)


def read_node_memory(path: str, number: int, nbytes: int, timeout_s: float) -> Tensor:
    """A copy of bucket ``number``, once it is there.

    Args:
        path: `NodeMemory.path` of a process on this node

    Raises:
        ValueError: the process has ended or is on another node, or the bucket was not there within
            ``timeout_s``.
    """
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    try:
        with Path(path).open("rb", buffering=0) as file:
            _wait(path, file.fileno(), number, timeout_s)
            _whole(os.preadv, file.fileno(), buffer)
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        raise ValueError(
            f"weight sync: expected this node's bucket {number} in the memory of a process that "
            f"receives for all of the node, found no {path}: that process has ended, runs as "
            "another user or is on another node. See the logs of policy and engines [RL4013]"
        ) from error
    return buffer


def _wait(path: str, descriptor: int, number: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (found := _number(descriptor)) != number:
        if time.monotonic() > deadline:
            raise ValueError(
                f"weight sync: expected bucket {number} in {path} within {timeout_s:g} s, found "
                f"{f'bucket {found}' if found >= 0 else 'none'}: the process that receives for all "
                "of this node hangs or is slow. See the logs of policy and engines [RL4013]"
            )
        time.sleep(POLL_S)
        Path(path).stat()  # the process still lives


def _number(descriptor: int) -> int:
    return int.from_bytes(os.pread(descriptor, _INT64, 0), "little", signed=True)


def _whole(
    move: Callable[[int, list[memoryview], int], int], descriptor: int, buffer: Tensor
) -> None:
    """Read or write all of ``buffer``: one call moves 2 GiB at most."""
    bytes_, done = buffer.numpy().data, 0
    while done < len(bytes_):
        moved = move(descriptor, [bytes_[done:]], HEADER + done)
        if moved == 0:
            raise ValueError(f"weight sync: expected {len(bytes_)} bytes, found {done} [RL4013]")
        done += moved
