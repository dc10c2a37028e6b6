"""The carrier "shm": POSIX shared memory of one host, by way of the CPU.

A segment per slot; who reads copies out of it. Every tensor has its own CRC-32.
"""

import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rltrain.config.rollout import Carrier
from rltrain.weights.transport import (
    SLOTS,
    Bucket,
    Named,
    TensorEntry,
    entry_of,
    shaped,
    tensor_bytes,
)

SHARED_MEMORY = Path("/dev/shm")

_SEGMENT = re.compile(r"rltrain-(\d+)-(\d+)-[0-9a-f]{16}")


class ShmSender:
    """The ``payload`` of its buckets: the name of a ``segment``.

    Raises:
        ValueError: /dev/shm has no room for the next tensor.
    """

    carrier: Carrier = "shm"

    def __init__(self) -> None:
        remove_abandoned()
        self._paths: list[Path | None] = [None] * SLOTS

    def send(self) -> None:
        pass

    def fill(self, slot: int, tensors: Named) -> tuple[list[TensorEntry], dict[str, Any]]:
        self._remove(slot)
        path = SHARED_MEMORY / _new_segment()
        self._paths[slot] = path
        try:
            with open(path, "xb", opener=_private) as segment:
                entries = [_write_tensor(segment, name, tensor) for name, tensor in tensors]
        except BaseException:
            self.close()
            raise
        return entries, {"segment": path.name}

    def close(self) -> None:
        for slot in range(SLOTS):
            self._remove(slot)

    def _remove(self, slot: int) -> None:
        path, self._paths[slot] = self._paths[slot], None
        if path is not None:
            path.unlink(missing_ok=True)


def read_segment(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, on CPU, copied out of shared memory and checked.

    Raises:
        ValueError: there is no such segment here, it is not ours, or a tensor's bytes are not
            those that were sent.
    """
    with _open_segment(bucket["payload"]["segment"]) as segment:
        for entry in bucket["tensors"]:
            yield entry["name"], _read_tensor(segment, entry)


def remove_abandoned() -> None:
    """Remove segments whose writer died; only those of this user and this pid namespace."""
    for path in SHARED_MEMORY.glob("rltrain-*"):
        match = _SEGMENT.fullmatch(path.name)
        if match is None or int(match[1]) != _pid_namespace():
            continue
        if not Path("/proc", match[2]).exists() and path.stat().st_uid == os.getuid():
            path.unlink(missing_ok=True)


def _write_tensor(segment: BinaryIO, name: str, tensor: torch.Tensor) -> TensorEntry:
    free = os.statvfs(segment.fileno())
    free_bytes = free.f_bavail * free.f_frsize
    if tensor.nbytes > free_bytes:
        raise ValueError(
            f"{SHARED_MEMORY} is too small for weight sync: {name} needs {tensor.nbytes} bytes, "
            f"found {free_bytes} free. Make it larger (docker: --shm-size; Kubernetes: an emptyDir "
            "with medium Memory) or lower the bucket size"
        )
    data = tensor_bytes(tensor)
    offset = segment.tell()
    segment.write(data)
    return {**entry_of(name, tensor, offset), "crc32": zlib.crc32(data)}


def _read_tensor(segment: BinaryIO, entry: TensorEntry) -> torch.Tensor:
    buffer = torch.empty(entry["nbytes"], dtype=torch.uint8)
    data = buffer.numpy().data
    segment.seek(entry["offset"])
    found_bytes = segment.readinto(data) if data.nbytes else 0  # type: ignore[attr-defined]
    found = zlib.crc32(data)
    if found_bytes != entry["nbytes"] or found != entry["crc32"]:
        raise ValueError(
            f"weight sync: {entry['name']} arrived changed: expected {entry['nbytes']} bytes with "
            f"crc32 {entry['crc32']:#010x}, found {found_bytes} with {found:#010x} in "
            f"{segment.name}. The sender must not touch a bucket before it is loaded"
        )
    return shaped(buffer, entry)


def _open_segment(name: str | None) -> BinaryIO:
    if name is None or not _SEGMENT.fullmatch(name):
        raise ValueError(f"expected a segment that a ShmSender wrote, found {name!r}")
    path = SHARED_MEMORY / name
    try:
        segment = open(path, "rb", opener=_private)  # noqa: SIM115 (the caller closes it)
    except FileNotFoundError as error:
        raise ValueError(
            f"weight sync: {path} is not here. The policy's rank 0 and the engine must share one "
            "host and one /dev/shm, and the sender must keep a bucket until it is loaded"
        ) from error
    status = os.fstat(segment.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        segment.close()
        raise ValueError(f"weight sync: {path} belongs to user {status.st_uid}, not to this one")
    return segment


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _new_segment() -> str:
    """A fresh name that tells who wrote it."""
    return f"rltrain-{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(8)}"
