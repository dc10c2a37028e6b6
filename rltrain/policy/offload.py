"""Where the memory of a learning model is: on its device, or waiting in host memory.

A GPU that trainer and rollout engine share is held by one of them at a time. What leaves keeps its
tensors and their views; only the storage below them is emptied and later filled again, so that
nothing that refers to a parameter, a gradient or a master has to know.
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
"""Of each part that a model has, all its tensors at the time of the call: an optimizer may make its
state at the first step."""

_ALIGNMENT = 512  # of CUDA's own allocations


@dataclass(frozen=True)
class _Block:
    """A storage that is away, and where its bytes wait."""

    storage: UntypedStorage
    nbytes: int
    offset: int


class Offloader:
    """Moves parts of a model between ``device`` and host memory.

    Gradients are not kept: they come back as zeros, and every accumulation starts from zero anyway.
    All else comes back bit for bit. A storage that two parts refer to belongs to the one that
    `PARTS` has first: in fp32 the optimizer's masters are the parameters themselves.

    The host memory of a part is pinned and kept for the next time, since pinning takes longer than
    the copy.
    """

    def __init__(self, device: torch.device, tensors: PartTensors) -> None:
        self._device = device
        self._tensors = tensors
        self._away: dict[ModelPart, list[_Block]] = {}
        self._host: dict[ModelPart, Tensor] = {}

    def offload(self, parts: Sequence[ModelPart]) -> None:
        """Free the device memory of ``parts``; those that are away or unknown stay as they are."""
        for part in self._known(parts):
            if part not in self._away:
                self._away[part] = self._empty(part)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[ModelPart]) -> None:
        """Bring ``parts`` back; those that are here or unknown stay as they are."""
        for part in self._known(parts):
            for block in self._away.pop(part, []):
                block.storage.resize_(block.nbytes)
                if part == "gradients":
                    _bytes_of(block.storage).zero_()
                else:
                    _bytes_of(block.storage).copy_(self._waiting(part, block), non_blocking=True)
        self._synchronize()

    def _known(self, parts: Sequence[ModelPart]) -> list[ModelPart]:
        if strange := sorted(set(parts) - set(PARTS)):
            raise ValueError(f"expected parts of a model among {list(PARTS)}, found {strange}")
        return [part for part in PARTS if part in parts and part in self._tensors]

    def _empty(self, part: ModelPart) -> list[_Block]:
        blocks, used = [], 0
        for storage in self._storages(part):
            blocks.append(_Block(storage, storage.nbytes(), used))
            used += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if part != "gradients":
            self._reserve(part, used)
            for block in blocks:
                self._waiting(part, block).copy_(_bytes_of(block.storage), non_blocking=True)
        self._synchronize()
        for block in blocks:
            block.storage.resize_(0)
        return blocks

    def _storages(self, part: ModelPart) -> list[UntypedStorage]:
        """Of the part alone, on the device, each once."""
        # A storage keeps its address when it is emptied; that of its bytes it does not.
        before = {
            tensor.untyped_storage()._cdata
            for other in PARTS[: PARTS.index(part)]
            for tensor in self._tensors.get(other, tuple)()
        }
        found = {s._cdata: s for s in (t.untyped_storage() for t in self._tensors[part]())}
        return [
            storage
            for address, storage in found.items()
            if address not in before and storage.nbytes() and storage.device == self._device
        ]

    def _waiting(self, part: ModelPart, block: _Block) -> Tensor:
        return self._host[part][block.offset : block.offset + block.nbytes]

    def _reserve(self, part: ModelPart, nbytes: int) -> None:
        """Host memory for what the part holds now."""
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
    """Parameters, frozen ones too, and buffers."""
    for chunk in chunks:
        # DDP has its gradient buffers under the name of torch's ``buffers``.
        module = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        yield from module.parameters()
        yield from module.buffers()


def gradient_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel)
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def optimizer_state(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """What the optimizer updates, in fp32, and Adam's two moments of it."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # nothing of its kind is trained on this rank
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for moments in part.optimizer.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _pin(host: Tensor, device: torch.device) -> None:
    """Let the device copy to and from ``host`` directly.

    ``torch.empty(pin_memory=True)`` would take the next power of two.
    """
    if device.type == "cuda" and host.numel():
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(host.data_ptr(), host.numel(), 0)))


def _unpin(host: Tensor, device: torch.device) -> None:
    if device.type == "cuda" and host.numel():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())))
