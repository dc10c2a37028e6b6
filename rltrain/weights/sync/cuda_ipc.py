"""The transport "ipc": CUDA IPC between a policy rank and a colocated engine worker.

Every policy rank whose GPU hosts an engine worker fills buffers on that GPU. The worker copies from
them, so no byte leaves the GPU. Handles are CUDA IPC handles as text; nothing is pickled.
"""

from typing import Any

import torch
from torch import Tensor

from rltrain.config.rollout import Transport
from rltrain.weights.sync.flat_buffers import FlatSlots, buffer_checksum, unpack_bucket
from rltrain.weights.sync.stream import SLOTS, Bucket, NamedTensors, TensorEntry

Handle = list[Any]
"""What torch needs to open a storage of another process. Bytes are hexadecimal text."""


def device_name(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in every process; "cpu" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


class IpcSender:
    """The ``payload`` of its buckets: ``nbytes``, ``buffer_checksum``, and ``handles`` by GPU."""

    transport: Transport = "ipc"

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._gpu = device_name(device)
        self._slots = FlatSlots(device, bucket_bytes)
        # By slot, the shared buffer and its handle. Share it once: torch counts its readers.
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
        """Free the buffers. The receivers must have closed theirs before."""
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
        """Copies of a bucket's tensors: vLLM keeps references until their layer is complete.

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
    """The handle of a buffer that is a whole storage; see `open_buffer`."""
    assert buffer.storage_offset() == 0
    handle = buffer.untyped_storage()._share_cuda_()
    return [x.hex() if isinstance(x, bytes) else x for x in handle]


def open_buffer(handle: Handle, device: torch.device) -> Tensor:
    """Open a buffer of another process on the same GPU, whose number may differ here.

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
