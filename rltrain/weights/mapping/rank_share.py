"""The parameters that a rank holds, from architecture and parallel layout alone. Needs no torch.

Equal to what Megatron builds on every rank (tests/distributed/test_share.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from rltrain.config.policy import ParallelConfig
from rltrain.parallel.layer_map import Pipeline
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.families import model_parameters
from rltrain.weights.mapping.parameters import ParameterSpec

MODEL_PARTS = (
    "embedding",
    "attention",
    "dense MLP",
    "router",
    "shared expert",
    "experts",
    "MTP",
    "head",
)
"""Parts of a model. A norm belongs to the part that it precedes, the last norm to the head."""
_OF_NAME = {
    "embedding.": "embedding",
    ".self_attention.": "attention",
    ".input_layernorm.": "attention",
    ".mlp.linear_fc": "dense MLP",
    ".mlp.router.": "router",
    ".pre_mlp_layernorm.": "router",
    ".mlp.shared_experts.": "shared expert",
    ".mlp.experts.": "experts",
}


@dataclass(frozen=True)
class RankParameter:
    """A parameter as one rank holds it: the whole or a shard."""

    name: str
    """Megatron's, with global numbers of layer and expert."""
    part: str
    numel: int
    kind: Literal["trained", "frozen", "buffer"]


def rank_parameters(
    arch: Architecture, layout: ParallelConfig, stage: int, chunk: int = 0, ep_rank: int = 0
) -> Iterator[RankParameter]:
    """The parameters of a rank of a pipeline stage in one of its model chunks.

    All tensor-parallel ranks hold the same number of elements, and so do expert-parallel ranks.

    Raises:
        ValueError: the layers cannot be divided over the stages, see `rltrain.parallel.layer_map`.
    """
    layers = Pipeline.of(layout).chunk_layers(arch.num_layers, stage, chunk)
    is_first = stage == chunk == 0
    is_last = stage == layout.pp - 1 and chunk == layout.vpp - 1
    experts = arch.num_experts // layout.ep
    local_experts = range(ep_rank * experts, (ep_rank + 1) * experts)
    for parameter in model_parameters(arch):
        if parameter.layer is None:
            here = is_first if model_part(parameter) == "embedding" else is_last
            # If one chunk has both ends, tied embeddings are one parameter.
            here = here and not (parameter.copy and is_first)
        else:
            here = parameter.layer in layers or (is_last and parameter.layer >= arch.num_layers)
        if here and (parameter.expert is None or parameter.expert in local_experts):
            numel = _numel(parameter, arch, layout)
            yield RankParameter(parameter.name, model_part(parameter), numel, parameter.rule.kind)


def model_part(parameter: ParameterSpec) -> str:
    if parameter.name.startswith("mtp."):
        return "MTP"
    parts = (part for text, part in _OF_NAME.items() if text in parameter.name)
    return next(parts, "head")


def _numel(parameter: ParameterSpec, arch: Architecture, layout: ParallelConfig) -> int:
    if parameter.rule.padded:
        return arch.padded_vocab_size(layout.tp) // layout.tp * arch.hidden_size
    whole = sum(prod(tensor.shape) for tensor in parameter.tensors)
    if parameter.rule.cut is None:
        return whole
    return whole // (layout.tp if parameter.expert is None else layout.etp)
