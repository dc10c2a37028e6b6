"""Where in a forward pass the first number that is not finite appears: after which layer, at which
token."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rltrain.parallel.token_layout import PAD
from rltrain.policy.megatron.megatron_model import layer_modules
from rltrain.policy.passes.micro_batch import MicroBatch
from rltrain.policy.passes.passes import ModelOnMesh, infer
from rltrain.policy.types import Place


def locate(
    model: ModelOnMesh, micro_batches: Sequence[MicroBatch], num_tokens: int, *, replay: bool
) -> Place | None:
    """Of what this rank computes: the lowest layer, and there the first token. Collective.

    The micro-batches run one by one, so that a hook knows whose numbers it sees.
    """
    found: list[Place] = []
    for micro_batch in micro_batches:
        alone = replace(micro_batch, number=0)
        with _watched(model.chunks, alone, found):
            outputs = infer(model, [alone], num_tokens, replay=replay)
        bad = [] if outputs is None else (~outputs.isfinite()).nonzero().flatten().tolist()
        found += [Place(model.arch.num_layers, token) for token in bad]
    return min(found, key=lambda place: (place.layer, place.token), default=None)


@contextmanager
def _watched(
    chunks: Sequence[nn.Module], micro_batch: MicroBatch, found: list[Place]
) -> Iterator[None]:
    """Within, the outputs of all layers are looked through."""
    rows = micro_batch.layout.routers  # a layer's rows are those that its router reads

    def watch(layer: int) -> Any:
        def look(module: nn.Module, args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]  # [rows, 1, H]
            bad = (~hidden.isfinite()).flatten(1).any(1).cpu() & (rows != PAD)
            for row in bad.nonzero().flatten().tolist():
                found.append(Place(layer, int(micro_batch.token_index[rows[row]])))

        return look

    with ExitStack() as hooks, torch.no_grad():
        for chunk in chunks:
            for layer, module in layer_modules(chunk).items():
                hooks.callback(module.register_forward_hook(watch(layer)).remove)
        yield
