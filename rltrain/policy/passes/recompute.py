"""Which routers the backward pass runs again. Pure: what a pass checks its schedule against."""

from collections.abc import Mapping, Sequence

from rltrain.config.policy import PolicyConfig


def router_reruns(policy: PolicyConfig, layers: Sequence[int]) -> Mapping[int, int]:
    """How often the backward pass reruns the router of each of a chunk's layers, 0 or 1.

    ``full`` reruns whole layers: all of them (``uniform``), or the chunk's first
    ``recompute_num_layers`` (``block``). ``selective`` reruns modules, of which only ``moe``, the
    whole expert layer, holds the router (megatron.core.transformer.moe.moe_layer).

    Args:
        layers: all decoder layers of one chunk in order, with and without a router
    """
    if policy.recompute == "full" and policy.recompute_method == "uniform":
        rerun = set(layers)
    elif policy.recompute == "full":
        rerun = set(layers[: policy.recompute_num_layers])
    elif policy.recompute == "selective" and "moe" in policy.recompute_modules:
        rerun = set(layers)
    else:
        rerun = set()
    return {layer: int(layer in rerun) for layer in layers}
