"""The families that have a map of their weights: one `Layout` each, perhaps by architecture."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from rltrain.weights.architecture import Architecture, FamilyName
from rltrain.weights.deepseek import deepseek_v3
from rltrain.weights.mapping import Layout, Parameter, expand
from rltrain.weights.qwen3 import QWEN3

LAYOUTS: dict[FamilyName, Callable[[Architecture], Layout]] = {
    "qwen3_moe": lambda arch: QWEN3,
    "qwen3": lambda arch: QWEN3,
    "deepseek_v3": deepseek_v3,
}


@lru_cache(maxsize=8)
def parameters(arch: Architecture) -> tuple[Parameter, ...]:
    """Every parameter and buffer of the model under its global Megatron name, in sending order."""
    found = expand(LAYOUTS[arch.family](arch), arch)
    if not arch.tie_embeddings:
        return found
    embedding, *_, head = found
    # A last pipeline stage of its own has an output layer, and it is the embedding once more.
    return (*found[:-1], replace(head, tensors=embedding.tensors, copy=True))
