"""Megatron's configuration for an architecture and the ``policy`` settings."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

from rltrain.config.policy import ParallelConfig, PolicyConfig, PrecisionConfig
from rltrain.policy.megatron.megatron_args import megatron_config
from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.megatron.rotary import rotary_factor
from rltrain.weights.architecture.decoder import MLA, Architecture, Llama3Rotary, Yarn


def params_dtype(precision: PrecisionConfig, device: torch.device) -> torch.dtype:
    if precision.params == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision.params]


def uses_transformer_engine(policy: PolicyConfig, device: torch.device) -> bool:
    installed = importlib.util.find_spec("transformer_engine") is not None
    return installed and device.type == "cuda" and policy.transformer_engine == "auto"


def transformer_config(
    arch: Architecture,
    policy: PolicyConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    routing_replay: bool,
) -> TransformerConfig:
    """Raises ``ValueError`` as `megatron_config` and `check_backend_layout` do."""
    check_backend_layout(arch, policy.parallel, uses_transformer_engine(policy, device))
    return megatron_config(
        policy.megatron_args,
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.mla is not None or arch.qk_norm == "heads",
        add_bias_linear=arch.linear_bias,
        add_qkv_bias=arch.qkv_bias,
        gated_linear_unit=True,
        **_activation_options(arch),
        softmax_type="learnable" if arch.attention_sinks else "vanilla",
        **_window_options(arch),
        **_run_options(policy, mesh, device),
        **_fused_options(arch, policy, device),
        **(_expert_options(arch) if arch.num_experts else {}),
        **(_routing_options(policy, device, routing_replay) if arch.num_experts else {}),
        **(_latent_attention_options(arch, arch.mla) if arch.mla else {}),
    )


def _run_options(policy: PolicyConfig, mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """Options that depend on how rltrain trains, not on the model."""
    dtype = params_dtype(policy.precision, device)
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "init_method": _nan_,
        "output_layer_init_method": _nan_,
        "tensor_model_parallel_size": mesh.tp_size,
        "pipeline_model_parallel_size": mesh.pp_size,
        "context_parallel_size": mesh.cp_size,
        "expert_model_parallel_size": mesh.ep_size,
        "expert_tensor_parallel_size": mesh.etp_size,
        "sequence_parallel": mesh.tp_size > 1,
        # Micro-batches differ in length, and a stage must know the size of what it receives.
        "variable_seq_lengths": mesh.pp_size > 1,
        "moe_token_dispatcher_type": policy.dispatcher,  # Megatron reads it for dense models, too
        **_pipeline_options(policy.parallel),
        # The loss function divides by itself. Its denominator is over all micro-batches.
        "calculate_per_token_loss": False,
        "finalize_model_grads_func": finalize_model_grads,
        **_recompute_options(policy),
    }


def _fused_options(
    arch: Architecture, policy: PolicyConfig, device: torch.device
) -> dict[str, Any]:
    """Fused kernels, which also round less often.

    Transformer Engine's rotary kernel has no factor of cos and sin. It does not synchronize, while
    Megatron's own code reads the sequence lengths from the device twice per layer.
    """
    can_fuse_rotary = arch.mla is None and rotary_factor(arch) == 1.0
    return {
        "apply_rope_fusion": can_fuse_rotary and uses_transformer_engine(policy, device),
        "bias_activation_fusion": device.type == "cuda" and arch.swiglu_limit is None,
    }


def check_backend_layout(
    arch: Architecture, parallel: ParallelConfig, transformer_engine: bool
) -> None:
    """Reject layouts that Megatron or Transformer Engine cannot compute, or not correctly.

    Raises:
        ValueError: this architecture does not support the layout. The message says what to set.
    """
    if arch.linear_bias and parallel.etp > 1:
        raise ValueError(
            f"policy.parallel.etp={parallel.etp}: the experts of {arch.family} have biases, which "
            "every expert-tensor rank would add; set etp=1 and share the experts out over ep"
            " [RL1010]"
        )
    if transformer_engine and parallel.cp > 1 and (arch.attention_sinks or arch.windowed_layers):
        raise ValueError(
            f"policy.parallel.cp={parallel.cp}: Transformer Engine has no context parallelism over "
            f"packed sequences for the attention sinks and windows of {arch.family}; set "
            "policy.transformer_engine=never or cp=1"
            " [RL1010]"
        )


def _activation_options(arch: Architecture) -> dict[str, Any]:
    if arch.swiglu_limit is None:
        return {"activation_func": F.silu}
    return {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": arch.swiglu_limit,
        "glu_linear_offset": 1.0,
    }


def _window_options(arch: Architecture) -> dict[str, Any]:
    return {
        # How many tokens before and after itself a token attends to.
        "window_size": None if arch.window is None else (arch.window - 1, 0),
        "window_attn_skip_freq": [int(i in arch.windowed_layers) for i in range(arch.num_layers)],
    }


def _pipeline_options(parallel: ParallelConfig) -> dict[str, Any]:
    interleaved = parallel.vpp > 1
    return {
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        # With batched messages, two interleaved stages take forward messages for backward ones, and
        # Megatron computes with them (see `guards.check_schedule`).
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _recompute_options(policy: PolicyConfig) -> dict[str, Any]:
    if policy.recompute == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(policy.recompute_modules),
        }
    if policy.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": policy.recompute_method,
            "recompute_num_layers": policy.recompute_num_layers,
        }
    return {}


def _latent_attention_options(arch: Architecture, mla: MLA) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": arch.rope_theta,
        **_latent_rotary_options(arch.rotary_scaling),
    }


def _latent_rotary_options(scaling: Llama3Rotary | Yarn | None) -> dict[str, Any]:
    """With MLA the attention has its own rotary embedding, and YaRN scales its softmax, too."""
    if scaling is None:
        # Megatron's default factor, 40, is for YaRN.
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    assert isinstance(scaling, Yarn)
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale or 1.0,
        "mscale_all_dim": scaling.mscale_all_dim or 0.0,
    }


def _expert_options(arch: Architecture) -> dict[str, Any]:
    return {
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.expert_size,
        "moe_layer_freq": [int(i in arch.moe_layers) for i in range(arch.num_layers)],
        "moe_router_topk": arch.experts_per_token,
        "moe_router_score_function": arch.score_function,
        "moe_router_enable_expert_bias": arch.expert_bias,
        "moe_router_num_groups": arch.num_groups if arch.num_groups > 1 else None,
        "moe_router_group_topk": arch.groups_per_token if arch.num_groups > 1 else None,
        "moe_router_topk_scaling_factor": arch.routed_scaling,
        "moe_shared_expert_intermediate_size": arch.shared_expert_size or None,
        "moe_shared_expert_gate": arch.shared_expert_gate,
        # Softmax over the chosen experts equals softmax over all, normalized over the chosen ones.
        "moe_router_pre_softmax": not arch.norm_topk_prob,
    }


def _routing_options(
    policy: PolicyConfig, device: torch.device, routing_replay: bool
) -> dict[str, Any]:
    """As `_run_options`, for models with experts."""
    router = policy.precision.router
    return {
        "moe_router_dtype": None if router == "params" else router,
        # Balancing is for pre-training. In RL it would pull the policy away from its objective.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": uses_transformer_engine(policy, device),
        "moe_enable_routing_replay": routing_replay,
    }


def _nan_(weight: torch.Tensor) -> None:
    torch.nn.init.constant_(weight, float("nan"))
