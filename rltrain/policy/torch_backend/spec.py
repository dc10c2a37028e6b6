"""Transformer layers in pure torch under Transformer Engine's parameter names.

Megatron-core gets its building blocks from a ``BackendSpecProvider``. This one needs no Transformer
Engine and reads packed sequences. Parameters have the names of Transformer Engine's blocks, so
checkpoints and weight rules are the same with and without it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rltrain.policy.torch_backend.attention import TorchAttention
from rltrain.policy.torch_backend.grouped_linear import ColumnGroupedLinear, RowGroupedLinear
from rltrain.policy.torch_backend.latent_attention import (
    TorchDuplicatedLinear,
    TorchMLASelfAttention,
)


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(
        torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    )
    # Each tensor-parallel rank sees its share of the tokens, so Megatron must sum gradients.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class TorchNorm(torch.nn.Module):
    """RMSNorm. Megatron's own torch norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm", config.normalization
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TorchNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and a column-parallel linear in one module, as in Transformer Engine."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        # A submodule would change the parameter's name.
        self.layer_norm_weight = _norm_weight(self.config, input_size)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        scale = self.layer_norm_weight
        x = F.rms_norm(x, scale.shape, scale, self.config.layernorm_epsilon)
        return super().forward(x, *args, **kwargs)


class TorchSpecProvider(BackendSpecProvider):
    """The classes of the torch backend."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def linear(self) -> type:
        return TorchDuplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TorchNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return TorchAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        # Megatron's class for Transformer Engine's experts is plain Python over two linears.
        return TEGroupedMLP, MLPSubmodules(
            linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear
        )

    def activation_func(self) -> None:
        return None


def torch_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's decoder block for Transformer Engine, built from the torch classes.

    Megatron names the provider in module globals. They are replaced while it builds the spec.
    """
    ours = {
        "TESpecProvider": TorchSpecProvider,
        "TENorm": TorchNorm,
        "MLASelfAttention": TorchMLASelfAttention,
    }
    theirs = {
        name: getattr(gpt_layer_specs, name) for name in ours if hasattr(gpt_layer_specs, name)
    }
    try:
        vars(gpt_layer_specs).update(ours)
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=vp_stage
        )
    finally:
        for name in ours:
            delattr(gpt_layer_specs, name)
        vars(gpt_layer_specs).update(theirs)
