"""Multi-token prediction layers of a checkpoint: held frozen, or skipped (ADR 8)."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from safetensors import SafetensorError, safe_open

from rltrain.config.bounded_files import MOST_OF_TABLES, load_json
from rltrain.weights.architecture.decoder import Architecture

MTP = Literal["hold", "skip"]
MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields of ``config.json``, two names of the same: the number of MTP layers."""
T = TypeVar("T")


def with_checkpoint_mtp(arch: Architecture, folder: Path, mtp: MTP) -> Architecture:
    """``arch`` without the MTP layers that ``mtp`` skips or that ``folder`` has no tensor of.

    transformers drops them when it loads a model, and keeps their number in ``config.json`` when it
    saves it. So a folder without any of their tensors has none.
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
    """Tensors of the model that MTP layers repeat: name of the copy -> name of the original.

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
    """``tensors``, each followed by its `mtp_copies`."""
    by_copy = mtp_copies(arch)
    for name, tensor in tensors:
        yield name, tensor
        for copy, original in by_copy.items():
            if original == name:
                yield copy, tensor


def _tensor_names(folder: Path) -> Iterable[str] | None:
    """From the index or the single file; None if it cannot be read."""
    try:
        single = folder / "model.safetensors"
        if not single.is_file():
            index = load_json(folder / "model.safetensors.index.json", MOST_OF_TABLES)
            return list(index["weight_map"])
        with safe_open(single, framework="numpy") as file:  # which imports no torch
            return list(file.keys())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None  # `load.open_checkpoint` reports what is wrong with the files
