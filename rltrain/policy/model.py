"""The Megatron model of an architecture on this rank."""

import importlib.util
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from rltrain.config.policy import ParallelConfig, PolicyConfig, PrecisionConfig
from rltrain.parallel.layers import Pipeline, route_layers
from rltrain.policy.guards import check_armed, check_replayable, check_schedule
from rltrain.policy.megatron_args import megatron_config
from rltrain.policy.mesh import Mesh
from rltrain.policy.mtp import frozen_mtp_block
from rltrain.policy.torch_backend import TorchSpecProvider, torch_block_spec
from rltrain.weights.architecture import MLA, Architecture


def build_model(
    arch: Architecture,
    policy: PolicyConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    routing_replay: bool,
    ddp: bool = True,
    freeze_router: bool = False,
) -> list[torch.nn.Module]:
    """The chunks of the model that live on this rank, their weights still to be loaded.

    Every weight but the norms' is NaN, so that one which is never loaded shows at once. Rows that
    pad the vocabulary to a multiple of tp are zero and stay so: whoever takes a softmax masks
    the columns from ``arch.vocab_size`` on.

    With ``ddp`` a chunk is wrapped in Megatron's DDP with buffers for the distributed optimizer;
    without, its parameters ask for no gradient (a reference model).

    Raises:
        ValueError: ``policy.megatron_args`` asks for what Megatron lacks, what rltrain sets itself,
            or what would spoil training or replay.
    """
    config = transformer_config(arch, policy, mesh, device=device, routing_replay=routing_replay)
    check_schedule(config)
    if config.moe_enable_routing_replay:
        check_replayable(config, version("megatron-core"))
    chunks = []
    for number in range(mesh.vpp_size):
        chunk = _build_chunk(config, arch, policy, mesh, number, device)
        if not ddp:
            chunk.requires_grad_(False)
        elif freeze_router:
            for router in decoder_routers(chunk).values():
                router.requires_grad_(False)
        # A copy of the configuration per wrapper: DDP writes its bucket size into it.
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        chunks.append(DistributedDataParallel(config, ddp_config, chunk) if ddp else chunk)
    return chunks


def _build_chunk(
    config: TransformerConfig,
    arch: Architecture,
    policy: PolicyConfig,
    mesh: Mesh,
    number: int,
    device: torch.device,
) -> GPTModel:
    vp_stage = number if mesh.vpp_size > 1 else None
    block_spec = _block_spec(config, policy, device, vp_stage)
    model = GPTModel(
        config,
        block_spec,
        vocab_size=arch.padded_vocab_size(mesh.tp_size),
        max_sequence_length=arch.max_positions,
        pre_process=mesh.reads_tokens(number),
        post_process=mesh.yields_logits(number),
        share_embeddings_and_output_weights=arch.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        vp_stage=vp_stage,
    )
    if arch.mtp_layers > 0 and mesh.yields_logits(number):
        backend = _backend(policy, device)
        model.mtp = frozen_mtp_block(config, block_spec, arch.mtp_layers, backend, vp_stage)
    _zero_vocabulary_padding(model, arch, mesh)
    _mark_experts(model)
    if config.moe_enable_routing_replay:
        check_armed(decoder_routers(model), _route_layers(arch, policy, mesh, number))
    if policy.precision.head == "fp32" and mesh.yields_logits(number):
        model.output_layer.register_forward_pre_hook(_in_fp32, with_kwargs=True)
    return model


def _route_layers(
    arch: Architecture, policy: PolicyConfig, mesh: Mesh, number: int
) -> tuple[int, ...]:
    """The layers with a router that this chunk should have, without asking Megatron."""
    sizes = policy.parallel
    pipeline = Pipeline(
        mesh.pp_size, mesh.vpp_size, sizes.first_stage_layers, sizes.last_stage_layers
    )
    return route_layers(pipeline, arch.num_layers, arch.moe_layers, mesh.pp_rank, number)


def decoder_layers(chunk: torch.nn.Module) -> list[int]:
    """The layers of this chunk's decoder, by 0-based global number, in order."""
    return [layer.layer_number - 1 for layer in _decoder(chunk).layers]


def decoder_routers(chunk: torch.nn.Module) -> dict[int, TopKRouter]:
    """The routers that a forward pass of this chunk's decoder runs, by 0-based global layer."""
    layers = [layer for layer in _decoder(chunk).layers if isinstance(layer.mlp, MoELayer)]
    return {layer.layer_number - 1: layer.mlp.router for layer in layers}


def _decoder(chunk: torch.nn.Module) -> Any:
    model: Any = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
    return model.decoder


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
    dtype = params_dtype(policy.precision, device)
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
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        init_method=_nan_,
        output_layer_init_method=_nan_,
        tensor_model_parallel_size=mesh.tp_size,
        pipeline_model_parallel_size=mesh.pp_size,
        context_parallel_size=mesh.cp_size,
        expert_model_parallel_size=mesh.ep_size,
        expert_tensor_parallel_size=mesh.etp_size,
        sequence_parallel=mesh.tp_size > 1,
        # Micro-batches differ in length, and a stage has to know what it will receive.
        variable_seq_lengths=mesh.pp_size > 1,
        moe_token_dispatcher_type=policy.dispatcher,  # read for dense models, too
        **_pipeline_options(policy.parallel),
        # The loss function takes its denominator from outside and divides by itself.
        calculate_per_token_loss=False,
        finalize_model_grads_func=finalize_model_grads,
        **_recompute_options(policy),
        **_expert_options(arch, policy, device, routing_replay),
        **(_latent_attention_options(arch.mla, arch.rope_theta) if arch.mla else {}),
    )


def _pipeline_options(parallel: ParallelConfig) -> dict[str, Any]:
    interleaved = parallel.vpp > 1
    return {
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "virtual_pipeline_model_parallel_size": parallel.vpp if interleaved else None,
        # Batched, the messages of two interleaved stages are paired wrongly: what goes forward is
        # received as what comes back, and Megatron computes on it.
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


def _latent_attention_options(mla: MLA, rope_theta: float) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
        "rotary_base": rope_theta,
        # Megatron's default, 40, is for YaRN.
        "rotary_scaling_factor": 1.0,
    }


def _expert_options(
    arch: Architecture, policy: PolicyConfig, device: torch.device, routing_replay: bool
) -> dict[str, Any]:
    if arch.num_experts == 0:
        return {}
    router = policy.precision.router
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
        # Softmax over all experts, or over the chosen ones, which is what normalizing amounts to.
        "moe_router_pre_softmax": not arch.norm_topk_prob,
        "moe_router_dtype": None if router == "params" else router,
        # Balancing belongs to pre-training: in RL it would move the policy against its objective.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": uses_transformer_engine(policy, device),
        "moe_enable_routing_replay": routing_replay,
    }


def _block_spec(
    config: TransformerConfig, policy: PolicyConfig, device: torch.device, vp_stage: int | None
) -> Any:
    if uses_transformer_engine(policy, device):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return torch_block_spec(config, vp_stage=vp_stage)


def _backend(policy: PolicyConfig, device: torch.device) -> BackendSpecProvider:
    if uses_transformer_engine(policy, device):
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return TorchSpecProvider()


def _nan_(weight: torch.Tensor) -> None:
    torch.nn.init.constant_(weight, float("nan"))


def _zero_vocabulary_padding(model: GPTModel, arch: Architecture, mesh: Mesh) -> None:
    rows = arch.padded_vocab_size(mesh.tp_size) // mesh.tp_size
    real = max(0, arch.vocab_size - mesh.tp_rank * rows)
    for name, param in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            param.data[real:] = 0


def _mark_experts(model: GPTModel) -> None:
    """Experts are reduced over the ranks that hold the same experts, whatever the layout.

    Megatron marks them so only for ep > 1. At ep=1, tp>1 each tensor rank sees other tokens, and
    without the mark their gradients would never be summed. It also reads ``tensor_model_parallel``
    as "counts in the gradient norm on every rank", which is right: no two ranks own the same shard.
    """
    for name, param in model.named_parameters():
        if ".mlp.experts." in name:
            param.allreduce = False
            param.tensor_model_parallel = True


def _in_fp32(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the output head multiply in fp32; ``weight`` is the embedding's where it is tied."""
    weight = kwargs.get("weight")
    weight = module.weight if weight is None else weight
    return (args[0].float(), *args[1:]), {**kwargs, "weight": weight.float()}
