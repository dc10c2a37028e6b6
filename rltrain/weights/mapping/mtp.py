"""Multi-token prediction layers of a checkpoint: held frozen, or left where they are (ADR 8)."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from rltrain.weights.architecture.decoder import Architecture

MTP = Literal["hold", "skip"]
MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Of ``config.json``: names of one setting, how many there are."""
T = TypeVar("T")


def with_checkpoint_mtp(arch: Architecture, folder: Path, mtp: MTP) -> Architecture:
    """``arch`` without the MTP layers that ``mtp`` skips or that ``folder`` has no tensor of.

    transformers drops them when it loads a model, and keeps their number in ``config.json`` when it
    saves it: where not one of their tensors is left, there are none.
    """
    if arch.mtp_layers == 0:
        return arch
    names = _tensor_names(folder)
    without = replace(arch, mtp_layers=0, skipped_mtp_layers=arch.mtp_layers)
    is_there = names is None or any(is_skipped_mtp(name, without) for name in names)
    return arch if mtp == "hold" and is_there else without


def is_skipped_mtp(name: str, arch: Architecture) -> bool:
    """Whether tensor ``name`` of the checkpoint belongs to an MTP layer that is not held."""
    first = arch.num_layers + arch.mtp_layers
    layers = range(first, first + arch.skipped_mtp_layers)
    return any(name.startswith(f"model.layers.{layer}.") for layer in layers)


def mtp_copies(arch: Architecture) -> dict[str, str]:
    """What MTP layers hold again of the model itself: name of the copy -> name of the original.

    Published checkpoints have these tensors, and the engine's draft models read them there.
    """
    head = "model.embed_tokens.weight" if arch.tie_embeddings else "lm_head.weight"
    layers = [f"model.layers.{arch.num_layers + depth}." for depth in range(arch.mtp_layers)]
    return {
        **{f"{layer}embed_tokens.weight": "model.embed_tokens.weight" for layer in layers},
        **{f"{layer}shared_head.head.weight": head for layer in layers},
    }


def with_mtp_copies(
    tensors: Iterable[tuple[str, T]], arch: Architecture
) -> Iterator[tuple[str, T]]:
    """``tensors``, and each `mtp_copies` of one right behind it."""
    by_copy = mtp_copies(arch)
    for name, tensor in tensors:
        yield name, tensor
        for copy, original in by_copy.items():
            if original == name:
                yield copy, tensor


def _tensor_names(folder: Path) -> Iterable[str] | None:
    """From the index or the header of the single file; None where neither can be read."""
    try:
        single = folder / "model.safetensors"
        if not single.is_file():
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            return list(index["weight_map"])
        with single.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return list(json.loads(file.read(min(length, single.stat().st_size))))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # `load.open_checkpoint` says what is wrong with them
