"""Which model a folder holds, told without reading all of it and whatever the folder is called.

Two folders are the same model when their architectures are, the files of their tokenizers, and
their weights as far as is looked at: name, type and shape of every tensor, and the first bytes of
some. So weights cut into other files, or copied to another folder, are the same model; those that
were trained further are another.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypedDict

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.manifest import MANIFEST
from rltrain.weights.huggingface.tensor_files import declared_files

TOKENIZER = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt")
"""Files that decide which text an id is. Templates and names of files may change."""
SAMPLED = 256
"""Tensors of which bytes are read, spread evenly over all by name."""
SAMPLE_BYTES = 4096


class ModelIdentity(TypedDict):
    """What a model is known by. Digests are the start of a SHA-256."""

    architecture: str
    """In words, and a digest of all of it."""
    tokenizer: str
    weights: str


def identity_of(folder: Path, arch: Architecture, imported: Path | None = None) -> ModelIdentity:
    """The identity of a Hugging Face folder.

    Args:
        imported: what ``rltrain import`` made of it, where the weights are read from that

    Raises:
        ValueError: the folder has no safetensors files, or one is cut off.
    """
    tokenizer = {n: _sha(_read(folder / n)) for n in TOKENIZER if (folder / n).is_file()}
    weights = _weights(folder) if imported is None else _sha(_read(imported / MANIFEST))
    return ModelIdentity(
        architecture=describe_architecture(arch), tokenizer=_digest(tokenizer), weights=weights
    )


def identity_of_recipe(arch: Architecture, recipe: Mapping[str, Any]) -> ModelIdentity:
    """The identity of a model that rltrain makes itself, by what it is made from."""
    return ModelIdentity(
        architecture=describe_architecture(arch), tokenizer="tiny", weights=_digest(dict(recipe))
    )


def describe_architecture(arch: Architecture) -> str:
    """``qwen3_moe, 4 layers, hidden size 128, 32 experts (3f2a...)``."""
    # Without defaults, so that one that a later version of rltrain adds changes no digest.
    defaults = {field.name: field.default for field in fields(arch)}
    settings = {n: v for n, v in asdict(arch).items() if getattr(arch, n) != defaults[n]}
    experts = f", {arch.num_experts} experts" if arch.num_experts else ""
    return (
        f"{arch.family}, {arch.num_layers} layers, hidden size {arch.hidden_size}, "
        f"vocabulary {arch.vocab_size}{experts} ({_digest(settings)})"
    )


def identity_differences(saved: Mapping[str, str], now: ModelIdentity) -> list[str]:
    """One line for each part in which two models differ; none where they are the same."""
    expected: Mapping[str, Any] = now
    return [
        f"{part}: {saved.get(part)} in the checkpoint, {expected[part]} in the model"
        for part in ModelIdentity.__annotations__
        if saved.get(part) != expected[part]
    ]


def _weights(folder: Path) -> str:
    tensors = {}
    for file in sorted(set(declared_files(folder).values())):
        tensors.update({name: (file, *place) for name, place in _header(file).items()})
    names = sorted(tensors)
    sampled = set(names[:: max(1, len(names) // SAMPLED)])
    entries = []
    for name in names:
        file, entry, start = tensors[name]
        begin, end = entry["data_offsets"]
        sample = _read(file, start + begin, min(end - begin, SAMPLE_BYTES))
        digest = _sha(sample) if name in sampled else ""
        entries.append([name, entry["dtype"], entry["shape"], digest])
    return _digest(entries)


def _header(file: Path) -> dict[str, tuple[dict[str, Any], int]]:
    """By name, what the file says of each tensor, and where the tensors begin."""
    length = int.from_bytes(_read(file, 0, 8), "little")
    try:
        header = json.loads(_read(file, 8, length))
    except ValueError as error:
        raise ValueError(f"{file} is not a whole safetensors file: fetch it again") from error
    return {n: (e, 8 + length) for n, e in header.items() if n != "__metadata__"}


def _read(file: Path, start: int = 0, length: int = -1) -> bytes:
    with open(file, "rb") as opened:
        opened.seek(start)
        return opened.read(length)


def _digest(value: Any) -> str:
    return _sha(json.dumps(value, sort_keys=True, default=str).encode())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
