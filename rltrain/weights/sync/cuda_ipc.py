"""The transport "ipc": the memory of a GPU that sender and receiver share, for a colocated engine.

Every policy rank whose GPU hosts an engine worker fills buffers of its own there, and each worker
reads those of its GPU: no byte leaves it. Handles are CUDA's own, as text: nothing is pickled.
"""

from typing import Any

import torch
from torch import Tensor

from rltrain.config.rollout import Transport
from rltrain.weights.sync.flat_buffers import FlatSlots, buffer_checksum, unpack_bucket
from rltrain.weights.sync.stream import SLOTS, Bucket, NamedTensors, TensorEntry

Handle = list[Any]
"""What torch needs to open a storage of another process, bytes as hexadecimal text."""


def device_name(device: torch.device) -> str:
    """Of a GPU the same in every process that sees it, by whatever number; else "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


class IpcSender:
    """The ``payload`` of its buckets: ``nbytes``, ``buffer_checksum``, and ``handles`` by GPU."""

    transport: Transport = "ipc"

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._gpu = device_name(device)
        self._slots = FlatSlots(device, bucket_bytes)
        # By slot, the buffer that was shared: torch counts who reads it, and once is enough.
        self._shared: list[tuple[Tensor, Handle] | None] = [None] * SLOTS

    def send(self) -> None:
        pass

    def fill(self, slot: int, tensors: NamedTensors) -> tuple[list[TensorEntry], dict[str, Any]]:
        entries, nbytes = self._slots.fill(slot, tensors)
        buffer = self._slots.buffers[slot]
        shared = self._shared[slot]
        if shared is None or shared[0] is not buffer:
            shared = buffer, share_buffer(buffer)
            self._shared[slot] = shared
        payload = {
            "nbytes": nbytes,
            "checksum": buffer_checksum(buffer[:nbytes]),  # which waits for the copies
            "handles": {self._gpu: shared[1]},
        }
        return entries, payload

    def close(self) -> None:
        """Receivers have closed what they opened: the memory is the device's again."""
        del self._slots
        self._shared.clear()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class IpcReceiver:
    """Opens each of the sender's buffers once per sync."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device_name(device)
        self._opened: dict[str, Tensor] = {}

    def read(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """The tensors of a bucket, copied: vLLM refers to them until their layer is complete.

        Raises:
            ValueError: no sender is on this GPU, or the bytes are not those that were sent.
        """
        handles = bucket["payload"]["handles"]
        if self._gpu not in handles:
            raise ValueError(
                f"weight sync: expected a policy rank on this engine's GPU {self._gpu}, found "
                f"some on {sorted(handles)}: use rollout.weight_transfer=broadcast"
            )
        handle = handles[self._gpu]
        key = str(handle)
        if key not in self._opened:
            self._opened[key] = open_buffer(handle, self._device)
        copy = self._opened[key][: bucket["payload"]["nbytes"]].clone()
        return unpack_bucket(copy, bucket)

    def close(self) -> None:
        self._opened.clear()
        torch.cuda.ipc_collect()


def share_buffer(buffer: Tensor) -> Handle:
    """What `open_buffer` takes; whole storages only."""
    assert buffer.storage_offset() == 0
    handle = buffer.untyped_storage()._share_cuda_()
    return [x.hex() if isinstance(x, bytes) else x for x in handle]


def open_buffer(handle: Handle, device: torch.device) -> Tensor:
    """The bytes of a buffer of another process, on this process's number of the same GPU.

    The order is that of torch.UntypedStorage._share_cuda_: device, memory, size, offset, counter
    of readers, its offset, event, whether the event is to be waited for.
    """
    _, memory, nbytes, offset, counter, counter_offset, event, waits = handle
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        bytes.fromhex(memory),
        nbytes,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        waits,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]
