"""Where in a forward pass the first number that is not finite appears: after which layer, at which
token."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
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

    The micro-batches run one by one, so that a hook knows whose numbers it sees. Attention may
    spread NaN over all tokens of a sequence: a weight of 0 does not stop it.
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

    def look(layer: int, hidden: Tensor) -> None:  # [rows, 1, H]
        bad = (~hidden.isfinite()).flatten(1).any(1).cpu() & (rows != PAD)
        for row in bad.nonzero().flatten().tolist():
            found.append(Place(layer, int(micro_batch.token_index[rows[row]])))

    def before(layer: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        look(layer - 1, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def after(layer: int, module: nn.Module, args: Any, output: Any) -> None:
        look(layer, output if isinstance(output, Tensor) else output[0])

    with ExitStack() as hooks, torch.no_grad():
        for modules in (layer_modules(chunk) for chunk in chunks):
            for layer, module in modules.items():
                hooks.callback(module.register_forward_hook(partial(after, layer)).remove)
            for layer in list(modules)[:1]:  # a stage before it, or the embedding
                first = partial(before, layer)
                hook = modules[layer].register_forward_pre_hook(first, with_kwargs=True)
                hooks.callback(hook.remove)
        yield
