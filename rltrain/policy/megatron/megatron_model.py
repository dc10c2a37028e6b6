"""The Megatron model of an architecture on this rank."""

from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.config.policy import PolicyConfig
from rltrain.parallel.layer_map import Pipeline, route_layers
from rltrain.policy.logprobs.head import in_fp32
from rltrain.policy.megatron.all_heads_norm import norm_all_heads
from rltrain.policy.megatron.frozen_mtp import frozen_mtp_block
from rltrain.policy.megatron.guards import check_armed, check_replay_options, check_schedule
from rltrain.policy.megatron.mesh import Mesh
from rltrain.policy.megatron.rotary import set_rotary
from rltrain.policy.megatron.transformer_options import transformer_config, uses_transformer_engine
from rltrain.policy.megatron.value_head import ValueHead
from rltrain.policy.torch_backend.grouped_linear import (
    ColumnGroupedLinear,
    GroupedLinear,
    RowGroupedLinear,
    is_aligned,
)
from rltrain.policy.torch_backend.spec import TorchSpecProvider, torch_block_spec
from rltrain.weights.architecture.decoder import Architecture


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
    """This rank's chunks of the model. Their weights are still to be loaded.

    Every weight but the norms' is NaN, so a weight that is never loaded shows at once. Rows that
    pad the vocabulary to a multiple of tp are zero and stay zero. A softmax must mask the columns
    from ``arch.vocab_size`` on.

    With ``ddp`` a chunk is wrapped in Megatron's DDP with buffers for the distributed optimizer.
    Without it no parameter requires a gradient, as for a reference model.

    Raises:
        ValueError: ``policy.megatron_args`` has a field that Megatron lacks, that rltrain sets
            itself, or that would break training or replay.
    """
    config = transformer_config(arch, policy, mesh, device=device, routing_replay=routing_replay)
    check_schedule(config)
    if config.moe_enable_routing_replay:
        check_replay_options(config, version("megatron-core"))
    chunks = []
    for number in range(mesh.vpp_size):
        chunk = _build_chunk(config, arch, policy, mesh, number, device)
        _finish(chunk, config, arch, policy, mesh, number)
        if not ddp:
            chunk.requires_grad_(False)
        elif freeze_router:
            for router in decoder_routers(chunk).values():
                router.requires_grad_(False)
        # Each wrapper needs its own copy of the configuration, as DDP writes its bucket size there.
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=policy.overlap_grad_reduce,
        )
        chunks.append(DistributedDataParallel(config, ddp_config, chunk) if ddp else chunk)
        for module in chunk.modules() if ddp else ():
            if isinstance(module, GroupedLinear):
                module.into_main_grad = True
                if policy.overlap_grad_reduce:
                    module.announce = partial(_gradient_is_ready, chunks[-1])
            elif hasattr(module, "fuse_wgrad_accumulation"):
                # A module of Transformer Engine. Megatron's option for this needs a kernel of APEX,
                # too, which only a head that runs within the model would call.
                module.fuse_wgrad_accumulation = True
    if ddp and policy.overlap_grad_reduce:
        # Gradients are reduced during the last micro-batch only.
        pauses = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return chunks


def _gradient_is_ready(chunk: DistributedDataParallel, weight: Tensor) -> None:
    chunk.param_to_bucket_group[weight].register_grad_ready(weight)


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
    if arch.qk_norm == "all":
        norm_all_heads(block_spec, arch)
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
        rotary_percent=arch.rotary_fraction,
        vp_stage=vp_stage,
    )
    set_rotary(model, arch)
    if arch.mtp_layers > 0 and mesh.yields_logits(number):
        backend = _backend(policy, device)
        model.mtp = frozen_mtp_block(config, block_spec, arch.mtp_layers, backend, vp_stage)
    return model


def _finish(
    model: GPTModel,
    config: TransformerConfig,
    arch: Architecture,
    policy: PolicyConfig,
    mesh: Mesh,
    number: int,
) -> None:
    _zero_vocabulary_padding(model, arch, mesh)
    _mark_experts(model)
    _mark_sinks(model, config)
    if config.moe_enable_routing_replay:
        check_armed(decoder_routers(model), _route_layers(arch, policy, mesh, number))
    if not mesh.yields_logits(number):
        return
    if arch.value_head:
        model.output_layer = ValueHead(config)
    elif policy.precision.head == "fp32":
        model.output_layer.register_forward_pre_hook(in_fp32, with_kwargs=True)


def _route_layers(
    arch: Architecture, policy: PolicyConfig, mesh: Mesh, number: int
) -> tuple[int, ...]:
    """The layers with a router that this chunk should have, by `layer_map`."""
    pipeline = Pipeline.of(policy.parallel)
    return route_layers(pipeline, arch.num_layers, arch.moe_layers, mesh.pp_rank, number)


def decoder_layers(chunk: torch.nn.Module) -> list[int]:
    """The layers of this chunk's decoder, by 0-based global number, in order."""
    return [layer.layer_number - 1 for layer in _decoder(chunk).layers]


def layer_modules(chunk: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """As `decoder_layers`, the modules."""
    return {layer.layer_number - 1: layer for layer in _decoder(chunk).layers}


def decoder_routers(chunk: torch.nn.Module) -> dict[int, TopKRouter]:
    """The routers of this chunk's decoder, by 0-based global layer."""
    layers = [layer for layer in _decoder(chunk).layers if isinstance(layer.mlp, MoELayer)]
    return {layer.layer_number - 1: layer.mlp.router for layer in layers}


def _decoder(chunk: torch.nn.Module) -> Any:
    model: Any = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
    return model.decoder


def _block_spec(
    config: TransformerConfig, policy: PolicyConfig, device: torch.device, vp_stage: int | None
) -> Any:
    if not uses_transformer_engine(policy, device):
        return torch_block_spec(config, vp_stage=vp_stage)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if groups_experts(config):
        for layer in spec.layer_specs:
            if (experts := getattr(layer.submodules.mlp.submodules, "experts", None)) is not None:
                experts.submodules.linear_fc1 = ColumnGroupedLinear
                experts.submodules.linear_fc2 = RowGroupedLinear
    return spec


def groups_experts(config: TransformerConfig) -> bool:
    """Whether experts use `GroupedLinear` in a model of Transformer Engine modules.

    FP8 needs Transformer Engine's experts, and ``grouped_mm`` takes aligned rows only.
    """
    if not config.num_moe_experts or config.fp8 or config.fp4:
        return False
    sizes = config.hidden_size, config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
    return is_aligned(sizes, config.params_dtype)


def _backend(policy: PolicyConfig, device: torch.device) -> BackendSpecProvider:
    if uses_transformer_engine(policy, device):
        # Imported here: the import fails where Transformer Engine is not installed.
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return TorchSpecProvider()


def _zero_vocabulary_padding(model: GPTModel, arch: Architecture, mesh: Mesh) -> None:
    rows = arch.padded_vocab_size(mesh.tp_size) // mesh.tp_size
    real = max(0, arch.vocab_size - mesh.tp_rank * rows)
    for name, param in model.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            param.data[real:] = 0


def _mark_experts(model: GPTModel) -> None:
    """Have the gradients of experts reduced over the ranks with the same experts, in every layout.

    Megatron marks experts this way only if ep > 1. At ep=1 and tp>1, tensor-parallel ranks see
    different tokens, and without the mark Megatron would not sum their gradients. Parameters with
    ``tensor_model_parallel`` count in the gradient norm on every rank. That is right, since no two
    ranks own the same shard.
    """
    for name, param in model.named_parameters():
        if ".mlp.experts." in name:
            param.allreduce = False
            param.tensor_model_parallel = True


def _mark_sinks(model: GPTModel, config: TransformerConfig) -> None:
    """Give attention sinks the rollout engine's precision, and mark them as tensor-parallel.

    Transformer Engine makes them in fp32 and without the mark, so the gradient norm would count
    only those of one rank.
    """
    for name, param in model.named_parameters():
        if name.endswith(".core_attention.softmax_offset"):
            param.data = param.data.to(config.params_dtype)
            param.tensor_model_parallel = True
