"""Digests of a model's tensors: two engines hold the same weights when these are equal."""

import hashlib
from collections.abc import Iterable

import torch

from rltrain.weights.sync.stream import tensor_bytes


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and the elements in C order."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def model_digest(model: torch.nn.Module) -> dict[str, str]:
    """Digest by name of all parameters and buffers, in the format in which the model holds them."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def check_same(synced: dict[str, str], fresh: dict[str, str]) -> None:
    """Check that a synced engine holds what a fresh one loaded.

    Raises:
        ValueError: naming the tensors that differ or that only one of the two has.
    """
    if differing := sorted(name for name in synced | fresh if synced.get(name) != fresh.get(name)):
        raise ValueError(
            f"weight sync: {len(differing)} of {len(synced | fresh)} engine tensors differ from "
            f"those of a fresh engine with the same weights: {_first(differing)}. The engine would "
            "sample from another model than the one that is trained: do not trust this run"
        )


def _first(names: Iterable[str], count: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:count]) + (
        f" and {len(listed) - count} more" if listed[count:] else ""
    )
