"""``policy.megatron_args``: fields that Megatron has and that rltrain does not set itself."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

MAY_CHANGE = frozenset(
    {
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_router_bias_update_rate",
        "apply_rope_fusion",
        "bias_activation_fusion",
    }
)
"""Fields that rltrain sets as a default only: balancing is off and kernels are fused."""

INSTEAD = {
    "tensor_model_parallel_size": "policy.parallel.tp",
    "sequence_parallel": "policy.parallel.tp",
    "pipeline_model_parallel_size": "policy.parallel.pp",
    "virtual_pipeline_model_parallel_size": "policy.parallel.vpp",
    "num_layers_in_first_pipeline_stage": "policy.parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "policy.parallel.last_stage_layers",
    "context_parallel_size": "policy.parallel.cp",
    "expert_model_parallel_size": "policy.parallel.ep",
    "expert_tensor_parallel_size": "policy.parallel.etp",
    "params_dtype": "policy.precision.params",
    "pipeline_dtype": "policy.precision.params",
    "bf16": "policy.precision.params",
    "fp16": "policy.precision.params",
    "moe_router_dtype": "policy.precision.router",
    "moe_token_dispatcher_type": "policy.dispatcher",
    "moe_permute_fusion": "policy.transformer_engine",
    "moe_enable_routing_replay": "routing_replay.mode",
    "recompute_granularity": "policy.recompute",
    "recompute_method": "policy.recompute_method",
    "recompute_num_layers": "policy.recompute_num_layers",
    "recompute_modules": "policy.recompute_modules",
    "moe_layer_recompute": "policy.recompute",
    "num_microbatches_with_partial_activation_checkpoints": "policy.recompute",
}
"""The configuration key to set in place of a field."""

ALWAYS_OURS = INSTEAD.keys() | {
    "num_moe_experts",
    "defer_embedding_wgrad_compute",  # of a head that Megatron runs
    "multi_latent_attention",
    "mtp_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "microbatch_group_size_per_vp_stage",
}
"""Fields that users may not set, including those that rltrain leaves at Megatron's default."""


def megatron_config(user_fields: Mapping[str, Any], **ours: Any) -> TransformerConfig:
    """The fields ``ours``, overridden by the user's.

    Raises:
        ValueError: ``user_fields`` names a field that Megatron lacks or that rltrain sets, or
            Megatron refuses the combination.
    """
    kind = MLATransformerConfig if ours.get("multi_latent_attention") else TransformerConfig
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    for name in user_fields:
        _check(name, known, (ours.keys() | ALWAYS_OURS) - MAY_CHANGE)
    try:
        return kind(**{**ours, **user_fields})
    except (AssertionError, TypeError, ValueError) as error:
        if not user_fields:
            raise
        raise ValueError(
            f"policy.megatron_args={dict(user_fields)}: Megatron refuses it together with what "
            f"rltrain sets: {error}"
            " [RL1014]"
        ) from error


def _check(name: str, known: Collection[str], reserved: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see megatron.core's TransformerConfig"
        raise ValueError(
            f"policy.megatron_args.{name}: the installed Megatron has no such field; {hint}"
            " [RL1014]"
        )
    if name in reserved:
        remedy = (
            f"set {INSTEAD[name]}"
            if name in INSTEAD
            else "it follows from the model or from how rltrain trains; leave it out"
        )
        raise ValueError(
            f"policy.megatron_args.{name}: rltrain sets this field itself: {remedy} [RL1014]"
        )
