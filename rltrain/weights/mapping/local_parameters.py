"""Which of the model's parameters and buffers this rank holds."""

import re
from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn

from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.grid import GridPosition

_LAYER = re.compile(r"^decoder\.layers\.(\d+)(?=\.|$)")
_EXPERT = re.compile(r"(\.mlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")
_HEAD = "output_layer.weight"
_BUFFER = ".mlp.router.expert_bias"
_WRAPPERS = re.compile(r"^(module\.)+")


def local_parameters(
    chunks: Sequence[nn.Module], arch: Architecture, position: GridPosition
) -> dict[str, Tensor]:
    """Global Megatron name -> the tensor that this rank holds of it: the whole or a shard.

    It includes expert biases, which are buffers; Megatron's other buffers hold no weights. It
    excludes the head of a critic, which is in no Hugging Face model.

    ``chunks`` are this rank's Megatron models, one for each virtual pipeline stage, wrapped in DDP
    or not. Layer numbers come from the layers themselves (``layer_number``, global, from 1), so
    uneven and interleaved stages need no arithmetic here.
    """
    if arch.num_experts % position.ep.size:
        raise ValueError(
            f"{arch.num_experts} experts cannot be shared out over ep={position.ep.size}; "
            "choose an ep that divides them"
        )
    first_expert = position.ep.rank * (arch.num_experts // position.ep.size)
    held: dict[str, Tensor] = {}
    for chunk in chunks:
        layers = _layer_numbers(chunk)
        for wrapped, tensor in chain(chunk.named_parameters(), chunk.named_buffers()):
            name = _WRAPPERS.sub("", wrapped)
            name = _LAYER.sub(lambda m, layers=layers: f"decoder.layers.{layers[m[1]]}", name)  # type: ignore[misc]
            name = _EXPERT.sub(lambda m: f"{m[1]}{first_expert + int(m[2])}", name)
            if arch.value_head and name == _HEAD:
                continue
            if isinstance(tensor, nn.Parameter) or name.endswith(_BUFFER):
                assert name not in held, f"two parameters are {name}"
                held[name] = tensor
    _check(held, arch, position)
    return held


def _layer_numbers(chunk: nn.Module) -> dict[str, int]:
    """Layer number in the chunk, as in its name -> number in the whole model, from 0."""
    numbers = {}
    for wrapped, module in chunk.named_modules():
        name = _WRAPPERS.sub("", wrapped)
        if (match := _LAYER.match(name)) and match.end() == len(name):
            number = module.layer_number
            assert isinstance(number, int)
            numbers[match[1]] = number - 1
    return numbers


def _check(held: dict[str, Tensor], arch: Architecture, position: GridPosition) -> None:
    """Check that model and weight rules have the same parameters: none is silently left out."""
    known = {parameter.name: parameter for parameter in model_parameters(arch)}
    if unknown := sorted(held.keys() - known.keys()):
        raise ValueError(f"{arch.family} has no weights for the model's {', '.join(unknown[:5])}")
    layers = {known[name].layer for name in held}
    share = max(arch.num_experts // position.ep.size, 1)
    missing = sorted(
        parameter.name
        for parameter in known.values()
        if parameter.name not in held
        and not parameter.copy
        and (parameter.layer in layers if parameter.layer is not None else position.pp.size == 1)
        and (parameter.expert is None or parameter.expert // share == position.ep.rank)
    )
    if missing:
        raise ValueError(f"the model has no parameter for {arch.family}'s {', '.join(missing[:5])}")
