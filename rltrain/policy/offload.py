"""Offloads parts of a trained model from its device to host memory, and onloads them again.

Trainer and rollout engine use a shared GPU alternately. An offloaded part keeps its tensors and
their views. Only their storage is emptied, and filled again later, so references to a parameter, a
gradient or a master weight stay valid.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

ModelPart = Literal["parameters", "gradients", "optimizer", "reference"]
PARTS: tuple[ModelPart, ...] = get_args(ModelPart)
PartTensors = Mapping[ModelPart, Callable[[], Iterable[Tensor]]]
"""For each part of a model, a function that returns the part's tensors at the time of the call. (An
optimizer may create its state at the first step.)"""

_ALIGNMENT = 512  # bytes, as CUDA aligns allocations


@dataclass(frozen=True)
class _Block:
    """An offloaded storage, and where its bytes are in the host memory of its part."""

    storage: UntypedStorage
    nbytes: int
    offset: int


class Offloader:
    """Moves parts of a model between ``device`` and host memory.

    Gradients are not kept: after onload they are zeros, as at the start of every accumulation. All
    other parts are restored bit for bit. A storage that two parts share belongs to the part that
    comes first in `PARTS`: in fp32 the optimizer's master weights are the parameters themselves.

    The host memory of a part is pinned and kept, because pinning takes longer than the copy.
    """

    def __init__(self, device: torch.device, tensors: PartTensors) -> None:
        self._device = device
        self._tensors = tensors
        self._offloaded: dict[ModelPart, list[_Block]] = {}
        self._host: dict[ModelPart, Tensor] = {}

    def offload(self, parts: Sequence[ModelPart]) -> None:
        """Free the device memory of ``parts``. Skips parts that the device or the model lacks."""
        for part in self._present(parts):
            if part not in self._offloaded:
                self._offloaded[part] = self._empty(part)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[ModelPart]) -> None:
        """Bring ``parts`` back. Skips parts that are on the device or that the model lacks."""
        for part in self._present(parts):
            for block in self._offloaded.pop(part, []):
                block.storage.resize_(block.nbytes)
                if part == "gradients":
                    _bytes_of(block.storage).zero_()
                else:
                    _bytes_of(block.storage).copy_(self._host_bytes(part, block), non_blocking=True)
        self._synchronize()

    def _present(self, parts: Sequence[ModelPart]) -> list[ModelPart]:
        if unknown := sorted(set(parts) - set(PARTS)):
            raise ValueError(f"expected parts of a model among {list(PARTS)}, found {unknown}")
        return [part for part in PARTS if part in parts and part in self._tensors]

    def _empty(self, part: ModelPart) -> list[_Block]:
        blocks, used = [], 0
        for storage in self._storages(part):
            blocks.append(_Block(storage, storage.nbytes(), used))
            used += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if part != "gradients":
            self._reserve(part, used)
            for block in blocks:
                self._host_bytes(part, block).copy_(_bytes_of(block.storage), non_blocking=True)
        self._synchronize()
        for block in blocks:
            block.storage.resize_(0)
        return blocks

    def _storages(self, part: ModelPart) -> list[UntypedStorage]:
        """The storages on the device that belong to ``part``, each once."""
        # A storage object keeps its address when it is emptied. Its bytes do not.
        shared = {
            tensor.untyped_storage()._cdata
            for other in PARTS[: PARTS.index(part)]
            for tensor in self._tensors.get(other, tuple)()
        }
        storages = {s._cdata: s for s in (t.untyped_storage() for t in self._tensors[part]())}
        return [
            storage
            for address, storage in storages.items()
            if address not in shared and storage.nbytes() and storage.device == self._device
        ]

    def _host_bytes(self, part: ModelPart, block: _Block) -> Tensor:
        return self._host[part][block.offset : block.offset + block.nbytes]

    def _reserve(self, part: ModelPart, nbytes: int) -> None:
        """Allocate host memory for the part, unless it has some of this size."""
        held = self._host.pop(part, None)
        if held is not None and held.numel() != nbytes:
            _unpin(held, self._device)
            held = None
        if held is None:
            held = torch.empty(nbytes, dtype=torch.uint8)
            _pin(held, self._device)
        self._host[part] = held

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def parameters_and_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    """Parameters, frozen ones included, and buffers."""
    for chunk in chunks:
        # DDP's ``buffers`` is a list of gradient buffers, not torch's method.
        module = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        yield from module.parameters()
        yield from module.buffers()


def gradient_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_state(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """The fp32 parameters that the optimizer updates, and Adam's two moments of each."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # this rank trains no parameter of its kind
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for moments in part.optimizer.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _pin(host: Tensor, device: torch.device) -> None:
    """Let the device copy to and from ``host`` directly.

    ``torch.empty(pin_memory=True)`` would allocate the next power of two.
    """
    if device.type == "cuda" and host.numel():
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(host.data_ptr(), host.numel(), 0)))


def _unpin(host: Tensor, device: torch.device) -> None:
    if device.type == "cuda" and host.numel():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())))
