"""Peak bytes of the live tensors that operations create, on any device."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that are made inside the block; views and in-place results count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._counted | given:
                self._counted.add(id(storage))
                self.live += storage.nbytes()
                weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _forget(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.live -= nbytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
