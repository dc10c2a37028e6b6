"""A sender whose slots a receiver reads for itself, as with the transport "ipc", on a CPU."""

from typing import Any

import torch
from torch import Tensor

from rltrain.config.rollout import Transport
from rltrain.weights.sync.flat_buffers import FlatSlots, buffer_checksum, unpack_bucket
from rltrain.weights.sync.stream import SLOTS, Bucket, NamedTensors, TensorEntry


class HeldSender:
    transport: Transport = "ipc"

    def __init__(self, bucket_bytes: int) -> None:
        self.slots = FlatSlots(torch.device("cpu"), bucket_bytes)

    def send(self) -> None:
        pass

    def fill(self, slot: int, tensors: NamedTensors) -> tuple[list[TensorEntry], dict[str, Any]]:
        entries, nbytes = self.slots.fill(slot, tensors)
        buffer = self.slots.buffers[slot][:nbytes]
        return entries, {"nbytes": nbytes, "checksum": buffer_checksum(buffer)}

    def read(self, bucket: Bucket) -> list[tuple[str, Tensor]]:
        buffer = self.slots.buffers[bucket["index"] % SLOTS][: bucket["payload"]["nbytes"]]
        return unpack_bucket(buffer.clone(), bucket)

    def close(self) -> None:
        pass
