"""The transport "broadcast": from a policy rank to engine workers, several at once.

They form a process group of their own: NCCL on GPUs, gloo on CPUs. Rank 0 is the policy's. Who
sends what to whom is in `rltrain.weights.sync.stage_plan`; an engine's end in
`rltrain.weights.sync.links`.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.config.rollout import Transport
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.weights.sync.flat_buffers import FlatSlots, SharedSlots, buffer_checksum
from rltrain.weights.sync.stream import SLOTS, NamedTensors, TensorEntry

SENDER = 0


class BroadcastGroup:
    """One process's membership in the group. The constructor is collective."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        start_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """
        Args:
            start_timeout_s: limit of meeting and connecting
            timeout_s: limit of every later broadcast

        Raises:
            RendezvousFailed: a rank does not come, or cannot be connected.
        """
        self._device = device
        size = len(rendezvous.members)
        store = rendezvous.join(rank, size, start_timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
        self._backend: Any

        def connect() -> None:
            if device.type == "cpu":
                limit = timedelta(seconds=start_timeout_s)
                self._backend = dist.ProcessGroupGloo(store, rank, size, limit)
                self._backend._set_default_timeout(timedelta(seconds=timeout_s))
            else:
                torch.cuda.set_device(device)  # of this thread
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=timeout_s)
                self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
            # NCCL connects at the first call. Connect here, where an error names its cause.
            self.broadcast(torch.zeros(1, device=device)).wait()
            if device.type != "cpu":
                torch.cuda.synchronize(device)

        backend = "gloo" if device.type == "cpu" else "nccl"
        rendezvous.connect(rank, backend, connect, start_timeout_s)

    def leave(self) -> None:
        """Give the connections back, whether or not the other members live. Nothing may be on its
        way, and nothing may be broadcast any more."""
        if self._device.type != "cpu":  # NCCL would wait for the others to leave
            self._backend.abort()
        del self._backend

    def broadcast(self, buffer: Tensor) -> Any:
        """Start to broadcast; after ``wait`` of the result ``buffer`` has the sender's bytes."""
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        options.asyncOp = True
        return self._backend.broadcast([buffer], options)


class SenderLink(NamedTuple):
    """What a policy rank that sends needs to know."""

    rendezvous: Rendezvous | None
    """Of its process group; None: it has none, since nobody is to receive."""
    node: str | None
    """Its own, if workers there read its slots."""


class BroadcastSender:
    """The ``payload`` of its buckets: ``nbytes``, ``buffer_checksum``, and ``memory`` by node.

    Args:
        group: None: nobody is to receive
        node: this process's, if workers of it read the slots
    """

    transport: Transport = "broadcast"

    def __init__(
        self,
        group: BroadcastGroup | None,
        device: torch.device,
        bucket_bytes: int,
        node: str | None = None,
    ) -> None:
        self._group = group
        self._device = device
        self._node = node
        self._slots = FlatSlots(device, bucket_bytes) if node is None else SharedSlots(bucket_bytes)
        self._count = 0
        self._filled: tuple[int, int] | None = None  # slot and bytes
        self._sending: list[Any] = [None] * SLOTS

    def send(self) -> None:
        """Broadcast the slot that was filled last; the receivers wait for it."""
        if self._filled is not None and self._group is not None:
            slot, nbytes = self._filled
            self._sending[slot] = self._group.broadcast(self._slots.buffers[slot][:nbytes])
            self._filled = None

    def fill(self, slot: int, tensors: NamedTensors) -> tuple[list[TensorEntry], dict[str, Any]]:
        self._wait(slot)
        entries, nbytes = self._slots.fill(slot, tensors)
        self._filled = slot, nbytes
        payload: dict[str, Any] = {
            "nbytes": nbytes,
            "checksum": buffer_checksum(self._slots.buffers[slot][:nbytes]),
        }
        if isinstance(self._slots, SharedSlots):
            self._slots.memory[slot].mark(self._count)
            payload["memory"] = {self._node: self._slots.memory[slot].path}
        self._count += 1
        return entries, payload

    def close(self) -> None:
        for slot in range(SLOTS):
            self._wait(slot)
        del self._slots
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _wait(self, slot: int) -> None:
        """Wait until later work on the device may overwrite the slot."""
        work, self._sending[slot] = self._sending[slot], None
        if work is not None:
            work.wait()
