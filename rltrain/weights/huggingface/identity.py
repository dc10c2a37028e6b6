"""The identity of the model in a folder, without reading all weights.

Two folders hold the same model if architecture, tokenizer files and weights are the same. Of the
weights, name, dtype and shape of every tensor are compared, and the first bytes of some. So the
same weights in other files or in another folder are the same model. Weights after more training are
another model.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypedDict

from rltrain.config.bounded_files import MOST_OF_TABLES, parse_json
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.huggingface.manifest import MANIFEST
from rltrain.weights.huggingface.tensor_files import declared_files

TOKENIZER = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt")
"""Files that define which text a token id is. Chat templates may differ."""
SAMPLED = 256
"""Number of tensors whose bytes are read, spread evenly over the sorted names."""
SAMPLE_BYTES = 4096


class ModelIdentity(TypedDict):
    """Digests are the first 16 hexadecimal digits of a SHA-256."""

    architecture: str
    """The main sizes in words, and a digest of all fields."""
    tokenizer: str
    weights: str


def identity_of(folder: Path, arch: Architecture, imported: Path | None = None) -> ModelIdentity:
    """The identity of a Hugging Face folder.

    Args:
        imported: the checkpoint of ``rltrain import``, if the weights are read from there

    Raises:
        ValueError: the folder has no safetensors files, or one is truncated.
    """
    tokenizer = {n: _sha(_read(folder / n)) for n in TOKENIZER if (folder / n).is_file()}
    weights = _weights(folder) if imported is None else _sha(_read(imported / MANIFEST))
    return ModelIdentity(
        architecture=describe_architecture(arch), tokenizer=_digest(tokenizer), weights=weights
    )


def identity_of_recipe(arch: Architecture, recipe: Mapping[str, Any]) -> ModelIdentity:
    """The identity of a model that rltrain creates, from the settings that determine it."""
    return ModelIdentity(
        architecture=describe_architecture(arch), tokenizer="tiny", weights=_digest(dict(recipe))
    )


def describe_architecture(arch: Architecture) -> str:
    """``qwen3_moe, 4 layers, hidden size 128, 32 experts (3f2a...)``."""
    # Without defaults, so that a new field with a default does not change the digest.
    defaults = {field.name: field.default for field in fields(arch)}
    settings = {n: v for n, v in asdict(arch).items() if getattr(arch, n) != defaults[n]}
    experts = f", {arch.num_experts} experts" if arch.num_experts else ""
    return (
        f"{arch.family}, {arch.num_layers} layers, hidden size {arch.hidden_size}, "
        f"vocabulary {arch.vocab_size}{experts} ({_digest(settings)})"
    )


def identity_differences(saved: Mapping[str, str], now: ModelIdentity) -> list[str]:
    """One line per part in which two models differ."""
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
        header = parse_json(_read(file, 8, min(length, MOST_OF_TABLES)), str(file))
    except ValueError as error:
        raise ValueError(
            f"{file} is not a whole safetensors file: fetch it again [RL3003]"
        ) from error
    return {n: (e, 8 + length) for n, e in header.items() if n != "__metadata__"}


def _read(file: Path, start: int = 0, length: int = -1) -> bytes:
    with open(file, "rb") as opened:
        opened.seek(start)
        return opened.read(length)


def _digest(value: Any) -> str:
    return _sha(json.dumps(value, sort_keys=True, default=str).encode())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
