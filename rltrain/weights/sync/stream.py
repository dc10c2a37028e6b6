"""A stream of named tensors from the policy to the engines, bucket by bucket.

A sync has one stream for each pipeline stage, or a single one for the whole model. Streams are
independent of one another; buckets of different streams may arrive in any order.

A transport (`cuda_ipc`, `broadcast`) moves the bytes. A bucket is described in plain JSON, with a
checksum by which a receiver verifies its bytes. A sender has two slots: it fills one while the
receivers load from the other, so at most two buckets exist at a time.

    stream = BucketStream(named_tensors, sender)
    bucket = stream.next_bucket()
    while bucket is not None:
        loading = load(bucket)                # begins
        bucket = stream.next_bucket()         # fills the other slot meanwhile
        wait(loading)
    stream.close()
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from rltrain.config.rollout import Transport

SLOTS = 2
BUCKET_BYTES = 512 * 2**20
"""Large enough that loading a bucket takes longer than the call for the next one."""
ALIGNMENT = 16
"""Alignment of a tensor in a bucket, so that every dtype can be read in place."""

PLACES = ("handles", "memory")
"""Fields of a payload that say where a process finds the bytes: by GPU, by node."""

NamedTensors = Iterator[tuple[str, Tensor]]


class TensorEntry(TypedDict):
    """One tensor of a bucket: ``nbytes`` at ``offset``, in C order."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int


class Bucket(TypedDict):
    transport: Transport
    stage: int
    """The number of its stream, below ``stages``."""
    stages: int
    """How many streams bring the model together."""
    index: int
    """From 0, in its stream."""
    last: bool
    """Of its stream."""
    tensors: list[TensorEntry]
    payload: dict[str, Any]
    """Where the bytes are, and their checksum; see the transport."""


class BucketSender(Protocol):
    """The sending end of a transport."""

    transport: Transport

    def send(self) -> None:
        """Send the slot that was filled last, if receivers do not fetch it themselves."""

    def fill(self, slot: int, tensors: NamedTensors) -> tuple[list[TensorEntry], dict[str, Any]]:
        """Copy all of ``tensors`` into a slot whose bytes are no longer needed.

        Returns:
            The bucket's entries and its payload. The bytes are in place when this returns.
        """

    def close(self) -> None:
        """Free the slots."""


class BucketStream:
    """Cuts a stream of (name, tensor) into buckets, each at most ``bucket_bytes``.

    A tensor larger than that gets a separate bucket. If the tensors come from a collective, every
    rank runs a stream, and ranks that send nothing pass no sender: all cut at the same places.
    The constructor takes the first tensor; `next_bucket` takes the others.

    Args:
        stage: the number of this stream among the ``stages`` that bring the model together

    Raises:
        ValueError: the stream is empty.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        sender: BucketSender | None,
        bucket_bytes: int,
        *,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        self._tensors = tensors
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._stage = stage, stages
        self._next_index = 0
        self._pending = next(tensors, None)
        if self._pending is None:
            raise ValueError("expected a stream of weights, found no tensor in it")

    def next_bucket(self) -> Bucket | None:
        """Fill the next slot and return its bucket; None at the end, and always without a sender.

        The bucket before the previous one must have been read, because its slot is filled again.
        """
        if self._sender is None:
            for _ in self._cut():
                pass
            return None
        self._sender.send()
        if self._pending is None:
            return None
        index = self._next_index
        self._next_index += 1
        entries, payload = self._sender.fill(index % SLOTS, self._cut())
        return Bucket(
            transport=self._sender.transport,
            stage=self._stage[0],
            stages=self._stage[1],
            index=index,
            last=self._pending is None,
            tensors=entries,
            payload=payload,
        )

    def close(self) -> None:
        """Call it after every bucket was read, or when none will be read."""
        if self._sender is not None:
            self._sender.close()

    def _cut(self) -> NamedTensors:
        """The tensors of one bucket: as many as fit, at least one."""
        used = 0
        while self._pending is not None:
            nbytes = aligned(self._pending[1].nbytes)
            if used and used + nbytes > self._bucket_bytes:
                return
            used += nbytes
            yield self._pending
            self._pending = next(self._tensors, None)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def tensor_entry(name: str, tensor: Tensor, offset: int) -> TensorEntry:
    return TensorEntry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        offset=offset,
        nbytes=tensor.nbytes,
    )


def tensor_view(buffer: Tensor, entry: TensorEntry) -> Tensor:
    """``buffer`` (uint8 ``[nbytes]``) viewed as the tensor of the entry."""
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"weight sync: {entry['name']} has the unknown dtype {entry['dtype']!r}")
    return buffer.view(dtype).reshape(entry["shape"])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of ``tensor`` in C order, as bytes on CPU; a view if no copy is needed."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def merge_buckets(buckets: Sequence[Bucket]) -> Bucket:
    """One bucket from those of all ranks that send the same tensors.

    Raises:
        ValueError: the ranks' buckets differ.
    """
    first = buckets[0]
    places: dict[str, dict[str, Any]] = {name: {} for name in PLACES}
    for rank, bucket in enumerate(buckets):
        same = bucket["tensors"] == first["tensors"] and bucket["last"] == first["last"]
        if not same or bucket["payload"]["checksum"] != first["payload"]["checksum"]:
            raise ValueError(
                f"weight sync: expected the same bytes from every sender, found other ones in "
                f"bucket {bucket['index']} of sender {rank} than in that of sender 0: the policy's "
                "ranks do not agree on the weights, do not trust this run"
            )
        for name, found in places.items():
            found |= bucket["payload"].get(name, {})
    return {**first, "payload": {**first["payload"], **places}}
