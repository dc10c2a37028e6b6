"""How much one micro-batch's forward pass keeps for its backward pass: an estimate. Pure.

Counted in numbers per token, in the policy's dtype, from measurements of the torch backend
(docs/plan.md). Transformer Engine keeps less, because it fuses operations.

h is the hidden size, K the experts per token, f an expert's intermediate size, E the number of
experts.
"""

from dataclasses import dataclass

from rltrain.config.policy import PolicyConfig
from rltrain.weights.architecture.decoder import MLA, Architecture

IMBALANCE = 1.5
"""Rows of the expert-parallel rank that gets the most, over the mean. Assumed."""


@dataclass(frozen=True)
class LayerActivations:
    """Numbers per token that a decoder layer keeps, on one tensor-parallel rank."""

    kept: float
    """Without what is recomputed."""
    recomputed: float
    """Made again in the backward pass, one layer at a time."""
    in_flight: float
    """At most, of gradients and dispatched tokens, while the layer is at work."""


def layer_activations(
    arch: Architecture, policy: PolicyConfig, number: int, *, position: int
) -> LayerActivations:
    """What layer ``number`` keeps, the ``position``-th of its model chunk."""
    parts = [*_attention(arch, policy.parallel.tp), *_mlp(arch, policy, number)]
    residual = 2 * arch.hidden_size / policy.parallel.tp
    whole = residual + sum(size for size, *_ in parts)
    in_flight = _in_flight(arch, policy, number)
    if policy.recompute == "full":
        method, count = policy.recompute_method, policy.recompute_num_layers
        if method == "block" and position >= count:
            return LayerActivations(whole, 0, in_flight)
        # Uniform keeps one input for each group of layers, and reruns the group at once.
        group = count if method == "uniform" else 1
        kept = arch.hidden_size / policy.parallel.tp / group
        return LayerActivations(kept, group * whole, in_flight)
    modules = policy.recompute_modules if policy.recompute == "selective" else []
    dropped = sum(size for size, *by in parts if {*by} & {*modules})
    return LayerActivations(whole - dropped, dropped, in_flight)


Kept = tuple[float, *tuple[str, ...]]
"""Numbers per token, and the `recompute_modules` that drop them."""


def _attention(arch: Architecture, tp: int) -> list[Kept]:
    if arch.mla:
        return _latent_attention(arch, arch.mla, tp)
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    normed = 0 if arch.qk_norm == "none" else 2 * (q + kv)
    return [
        (2 * arch.hidden_size / tp,),  # the norm, which is one module with the projection
        ((q + 2 * kv + normed + q + kv) / tp,),  # projected, normed, rotated
        ((q + 2 * kv + q) / tp, "core_attn"),  # as the kernel reads and writes them
        (q / tp,),
    ]


def _latent_attention(arch: Architecture, mla: MLA, tp: int) -> list[Kept]:
    qk, v = arch.num_heads * mla.qk_head_dim, arch.num_heads * mla.v_head_dim
    nope = arch.num_heads * mla.qk_nope_head_dim
    latents = 3 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) + mla.qk_rope_head_dim
    return [
        (2 * arch.hidden_size / tp, "layernorm"),
        (latents,),  # every tensor-parallel rank has them whole
        ((qk + nope + v + 2 * qk + v) / tp, "mla_up_proj"),
        ((2 * qk + v + v) / tp, "core_attn"),
        (v / tp,),
    ]


def _mlp(arch: Architecture, policy: PolicyConfig, number: int) -> list[Kept]:
    """SwiGLU keeps the two halves of its input, silu of one, the other again, their product."""
    h, parallel = arch.hidden_size, policy.parallel
    if number not in arch.moe_layers:
        return [((2 * h + 5 * arch.ffn_size) / parallel.tp, "mlp")]
    rows, f = _rows(arch, policy), arch.expert_size / parallel.etp
    return [
        (2 * h / parallel.tp, "layernorm"),
        (4 * arch.num_experts / parallel.tp, "moe"),  # the router
        (rows * (h + 2 * f), "moe"),
        (rows * 4 * f, "moe", "moe_act"),  # the fourth is the product with the gate
        (5 * arch.shared_expert_size / parallel.tp, "moe", "shared_experts"),
    ]


def _in_flight(arch: Architecture, policy: PolicyConfig, number: int) -> float:
    h, parallel = arch.hidden_size, policy.parallel
    if number not in arch.moe_layers:
        return 4 * arch.ffn_size / parallel.tp + h
    return _rows(arch, policy) * (2 * h + 4 * arch.expert_size / parallel.etp)


def _rows(arch: Architecture, policy: PolicyConfig) -> float:
    """Rows that a rank's experts compute, per token of its data-parallel rank."""
    parallel = policy.parallel
    uneven = IMBALANCE if parallel.ep > 1 else 1.0
    return uneven * arch.experts_per_token * parallel.etp / parallel.tp


def micro_batches_in_flight(policy: PolicyConfig, stage: int, micro_batches: int) -> int:
    """Forward passes of one chunk that wait for their backward pass on a stage, at most.

    1F1B: as many as there are stages from this one on. Interleaved:
    ``get_pp_rank_microbatches`` of megatron.core.pipeline_parallel.schedules, and the one at work.
    """
    parallel = policy.parallel
    later_stages = parallel.pp - stage - 1
    if parallel.vpp == 1:
        return min(micro_batches, later_stages + 1)
    warm_up = 2 * later_stages + (parallel.vpp - 1) * parallel.pp
    return min(micro_batches * parallel.vpp, warm_up + 1)
