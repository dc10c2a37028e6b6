"""Tensors from one process to another on the same host, through POSIX shared memory.

A stream of named tensors is cut into buckets. The sender writes one bucket, the receivers read
it, and asking for the next one removes it, so /dev/shm never holds more than one. What describes
a bucket is plain JSON; its checksums tell the receiver that it got the sender's bytes.

    with BucketWriter(named_tensors) as writer:          # the sender
        while (bucket := writer.next_bucket()) is not None:
            deliver(bucket)                              # returns once it was read

    for name, tensor in read_bucket(bucket): ...         # the receiver
"""

import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self, TypedDict

import torch

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 256 * 2**20

_SEGMENT = re.compile(r"rltrain-(\d+)-(\d+)-[0-9a-f]{16}")


class TensorEntry(TypedDict):
    """One tensor of a bucket: ``nbytes`` at ``offset``, in C order."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    crc32: int


class Bucket(TypedDict):
    """One shared-memory segment. Segment None: this rank only took part and wrote nothing."""

    index: int
    segment: str | None
    last: bool
    tensors: list[TensorEntry]


class BucketWriter:
    """Writes a stream of (name, tensor) bucket by bucket, each at most ``bucket_bytes``.

    A tensor larger than that gets a bucket of its own. Where making the stream is collective,
    every rank runs a writer and all but one pass ``write=False``: they cut the stream at the same
    places and write nothing. The first tensor is taken at once, the rest as buckets are asked for.

    Raises:
        ValueError: the stream is empty.
    """

    def __init__(
        self,
        tensors: Iterator[tuple[str, torch.Tensor]],
        bucket_bytes: int = BUCKET_BYTES,
        write: bool = True,
    ) -> None:
        if write:
            remove_abandoned()
        self._tensors = tensors
        self._bucket_bytes = bucket_bytes
        self._write = write
        self._next_index = 0
        self._path: Path | None = None
        self._pending = next(tensors, None)
        if self._pending is None:
            raise ValueError("expected a stream of weights, found no tensor in it")

    def next_bucket(self) -> Bucket | None:
        """Remove the bucket before, which must have been read, and write the next; None at the end.

        Raises:
            ValueError: /dev/shm has no room for the next tensor.
        """
        self.close()
        if self._pending is None:
            return None
        entries: list[TensorEntry] = []
        if self._write:
            self._path = SHARED_MEMORY / _new_segment()
            try:
                with open(self._path, "xb", opener=_private) as segment:
                    for name, tensor in self._cut():
                        entries.append(_write_tensor(segment, name, tensor))
            except BaseException:
                self.close()
                raise
        else:
            for _ in self._cut():
                pass
        self._next_index += 1
        return Bucket(
            index=self._next_index - 1,
            segment=self._path.name if self._path else None,
            last=self._pending is None,
            tensors=entries,
        )

    def close(self) -> None:
        """Remove what this writer has in shared memory."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one bucket: as many as fit, at least one."""
        used = 0
        while self._pending is not None:
            nbytes = self._pending[1].nbytes
            if used and used + nbytes > self._bucket_bytes:
                return
            used += nbytes
            yield self._pending
            self._pending = next(self._tensors, None)


def read_bucket(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, on CPU, copied out of shared memory and checked.

    Raises:
        ValueError: there is no such segment here, it is not ours, or a tensor's bytes are not
            those that were sent.
    """
    with _open_segment(bucket["segment"]) as segment:
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


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of ``tensor`` in C order, as bytes on CPU; a view where it already is so."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
    return TensorEntry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        offset=offset,
        nbytes=data.nbytes,
        crc32=zlib.crc32(data),
    )


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
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"weight sync: {entry['name']} has the unknown dtype {entry['dtype']!r}")
    return buffer.view(dtype).reshape(entry["shape"])


def _open_segment(name: str | None) -> BinaryIO:
    if name is None or not _SEGMENT.fullmatch(name):
        raise ValueError(f"expected a segment that a BucketWriter wrote, found {name!r}")
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
