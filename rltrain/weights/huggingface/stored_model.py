"""Where a model's parameters are in a Megatron checkpoint, whatever parallel layout wrote it.

`checkpoint_probe` asks Megatron for it. Reading and writing the files needs nothing else.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from pydantic import TypeAdapter

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.parameters import ParameterSpec

POLICY, HUGGINGFACE = "policy", "huggingface"
"""Folders of a checkpoint: Megatron's files; configuration and tokenizer, where it is imported."""


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor. Its shape has leading ones where many parameters are one tensor."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of the stored tensor."""


@dataclass(frozen=True)
class StoredModel:
    """The content of a checkpoint of an architecture's weights."""

    chunks: dict[str, tuple[Chunk, ...]]
    """Megatron name -> its rows from first to last, in equal chunks: one, or gate and up."""
    objects: tuple[str, ...]
    """Keys of Transformer Engine's extra state; all values are None."""
    content: dict[str, Any]
    """Megatron's ``content_metadata``."""

    def to_json(self) -> str:
        return _JSON.dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> "StoredModel":
        return _JSON.validate_json(text)


_JSON = TypeAdapter(StoredModel)


class ConversionProgress(Protocol):
    """Is told how many elements of the model are done, and their bytes."""

    def advance(self, elements: int, nbytes: int) -> None: ...


def owned_parameters(arch: Architecture) -> list[ParameterSpec]:
    """The parameters that a checkpoint stores: every one once."""
    return [parameter for parameter in model_parameters(arch) if not parameter.copy]


def parameter_numel(parameter: ParameterSpec) -> int:
    return sum(prod(tensor.shape) for tensor in parameter.tensors)
