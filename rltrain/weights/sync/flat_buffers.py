"""A bucket is one buffer of bytes on a device, with one checksum."""

import torch
from torch import Tensor

from rltrain.weights.sync.node_memory import NodeMemory
from rltrain.weights.sync.stream import (
    SLOTS,
    Bucket,
    NamedTensors,
    TensorEntry,
    aligned,
    tensor_entry,
    tensor_view,
)


class FlatSlots:
    """The sender's buffers, one per slot. A slot grows for a tensor larger than a bucket."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._device = device
        self.buffers = [self._empty(slot, bucket_bytes) for slot in range(SLOTS)]

    def fill(self, slot: int, tensors: NamedTensors) -> tuple[list[TensorEntry], int]:
        """Copy ``tensors`` into the slot; returns their entries and the bytes they take."""
        entries: list[TensorEntry] = []
        used = 0
        for name, tensor in tensors:
            if used + tensor.nbytes > self.buffers[slot].numel():
                assert used == 0, "only a bucket's first tensor may be larger than a bucket"
                self.buffers[slot] = self._empty(slot, tensor.nbytes)
            entry = tensor_entry(name, tensor, used)
            tensor_view(_place(self.buffers[slot], entry), entry).copy_(tensor)
            entries.append(entry)
            end, used = used + tensor.nbytes, used + aligned(tensor.nbytes)
            if end < used:  # the checksum covers the padding, and all senders must agree on it
                self.buffers[slot][end:used].zero_()
        return entries, used

    def _empty(self, slot: int, nbytes: int) -> Tensor:
        # Not zeros: on a CPU they would commit the memory of a whole bucket for a small model.
        return torch.empty(aligned(nbytes), dtype=torch.uint8, device=self._device)


class SharedSlots(FlatSlots):
    """Slots on a CPU that other processes of the node can read, in `memory` by slot."""

    def __init__(self, bucket_bytes: int) -> None:
        self.memory = [NodeMemory() for _ in range(SLOTS)]
        super().__init__(torch.device("cpu"), bucket_bytes)

    def _empty(self, slot: int, nbytes: int) -> Tensor:
        self.memory[slot] = NodeMemory()  # what is mapped cannot grow
        return self.memory[slot].mapped(aligned(nbytes))


def buffer_checksum(buffer: Tensor) -> int:
    """The sum of the bytes, eight at a time, modulo 2**64.  # uint8 [a multiple of 16]

    It differs if the receiver read other bytes than were sent: too early, too late or elsewhere.
    It waits for all work on the device that ``buffer`` depends on.
    """
    return int(buffer.view(torch.int64).sum().item())


def unpack_bucket(buffer: Tensor, bucket: Bucket) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its bytes.

    Raises:
        ValueError: they are not the sender's.
    """
    actual, expected = buffer_checksum(buffer), bucket["payload"]["checksum"]
    if actual != expected:
        raise ValueError(
            f"weight sync: bucket {bucket['index']} arrived changed: expected {buffer.numel()} "
            f"bytes with checksum {expected}, found {actual}. The sender must not touch a bucket "
            "before it is loaded"
        )
    return [
        (entry["name"], tensor_view(_place(buffer, entry), entry)) for entry in bucket["tensors"]
    ]


def _place(buffer: Tensor, entry: TensorEntry) -> Tensor:
    return buffer[entry["offset"] : entry["offset"] + entry["nbytes"]]
