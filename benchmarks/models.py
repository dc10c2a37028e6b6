"""Model folders to measure with: a published configuration, fewer layers, random weights.

Speed depends on shapes and on how evenly tokens spread over experts, not on trained weights.
Random routers spread them evenly, the best case. ``skew`` makes some experts more popular.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltrain.data.cache import save_atomically
from rltrain.data.tokenizer import tiny_tokenizer
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters, read_architecture
from rltrain.weights.huggingface.export import write_huggingface

MODELS = Path("~/.cache/rltrain/benchmarks").expanduser()
CONFIGS = Path(__file__).parents[1] / "conf/model"


def random_slice(
    folder: Path, name: str = "Qwen3-30B-A3B", *, layers: int = 4, skew: float = 0.0
) -> Path:
    """The first ``layers`` of a model of ``conf/model``, in bf16, with the tiny tokenizer.

    Args:
        folder: where such models are cached
        skew: standard deviation of the logarithm of the length of a router's rows

    Returns:
        The model's folder.
    """
    path = folder / f"{name}-{layers}-layers-skew-{skew:g}"
    if not path.exists():
        save_atomically(path, lambda beside: _save(beside, name, layers, skew))
    return path


def random_model(folder: Path, config: Mapping[str, Any]) -> Architecture:
    """A new folder: ``config.json`` and random bf16 weights, without a tokenizer."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config))
    return _with_weights(folder, source)


def _save(beside: Path, name: str, layers: int, skew: float) -> None:
    source = beside / "source"
    source.mkdir()
    config = json.loads((CONFIGS / name / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (source / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(source)
    _with_weights(beside, source, skew)


def _with_weights(folder: Path, source: Path, skew: float = 0.0) -> Architecture:
    """Move the model of ``source``, a folder of ``folder``, there, with weights."""
    arch = read_architecture(source)
    write_huggingface(folder / "model", source, _random(arch, skew), arch, torch.bfloat16)
    for file in [*source.iterdir()]:
        file.unlink()
    source.rmdir()
    for file in [*(folder / "model").iterdir()]:
        file.rename(folder / file.name)
    (folder / "model").rmdir()
    return arch


def _random(arch: Architecture, skew: float) -> Iterator[tuple[str, Tensor]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draw = torch.Generator(device).manual_seed(0)
    for parameter in model_parameters(arch):
        for tensor in parameter.tensors:
            values = torch.randn(tensor.shape, generator=draw, device=device)
            values = 1 + values / 50 if len(tensor.shape) == 1 else values / 50
            if skew and ".mlp.gate." in tensor.name:
                rows = torch.randn((len(values), 1), generator=draw, device=device)
                values = values * (skew * rows).exp()
            yield tensor.name, values.bfloat16()
