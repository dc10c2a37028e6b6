"""Transformer layers in pure torch under Transformer Engine's parameter names.

Megatron-core asks a ``BackendSpecProvider`` for its building blocks. This one needs no Transformer
Engine, reads packed sequences, and names every parameter as Transformer Engine's blocks do, so that
checkpoints and weight maps are the same with and without it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    _initialize_affine_weight_gpu,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide

from rltrain.policy.torch_attention import TorchAttention
from rltrain.policy.torch_mla import TorchDuplicatedLinear, TorchMLASelfAttention


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(
        torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    )
    # Each rank of a tensor group sees its share of the tokens, so its gradient is to be summed.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class TorchNorm(torch.nn.Module):
    """RMSNorm; Megatron's own torch norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        assert config.normalization == "RMSNorm", config.normalization
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TorchNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear, as one module like Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        # Not a submodule: that would change the parameter's name.
        self.layer_norm_weight = _norm_weight(self.config, input_size)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        scale = self.layer_norm_weight
        x = F.rms_norm(x, scale.shape, scale, self.config.layernorm_epsilon)
        return super().forward(x, *args, **kwargs)


class _GroupedLinear(torch.nn.Module):
    """One linear map per local expert, ``weight{i}`` of shape [out, in], perhaps with ``bias{i}``.

    The dispatcher has gathered what the expert needs over the expert-tensor group and will reduce
    what it returns, so there is no communication in here.
    """

    split_axis: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        assert is_expert and (skip_bias_add or self.split_axis == 0)
        self.num_gemms = num_gemms
        self.groups = pg_collection
        self.skip_bias_add = skip_bias_add
        self.with_bias = bias
        shape = [output_size, input_size]
        shape[self.split_axis] = divide(shape[self.split_axis], pg_collection.expt_tp.size())
        for i in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            _initialize_affine_weight_gpu(weight, init_method, self.split_axis, is_expert=True)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                rows = torch.full_like(weight[:, 0], float("nan"))
                self.register_parameter(f"bias{i}", torch.nn.Parameter(rows))
        self._register_load_state_dict_pre_hook(self._drop_extra_states)

    def forward(
        self, x: torch.Tensor, m_splits: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """x [tokens, in], sorted by expert; m_splits: how many are each expert's.

        Returns [tokens, out], and the biases where it is for the caller to add them.
        """
        biases = self._each("bias") if self.with_bias else None
        added = [None] * self.num_gemms if biases is None or self.skip_bias_add else biases
        parts = zip(x.split(m_splits), self._each("weight"), added, strict=True)
        out = torch.cat([F.linear(*part) for part in parts])
        return out, biases if self.skip_bias_add else None

    def _each(self, name: str) -> list[torch.Tensor]:
        return [getattr(self, f"{name}{i}") for i in range(self.num_gemms)]

    def get_extra_state(self) -> None:
        """Transformer Engine keeps FP8 state here; the key stays, so checkpoints are the same."""

    def set_extra_state(self, state: Any) -> None: ...

    def _drop_extra_states(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", None)
        for i in range(1, self.num_gemms):
            state_dict.pop(f"{prefix}_extra_state{i}", None)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """As Transformer Engine's grouped linear: a tensor per expert, keyed without its number."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        assert not metadata.get("singleton_local_shards", False)
        num_experts = self.groups.ep.size() * self.num_gemms
        result: ShardedStateDict = {}
        names = ["weight", "bias"] if self.with_bias else ["weight"]
        cut = names if self.split_axis == 0 else ["weight"]
        for i in range(self.num_gemms):
            expert = self.groups.ep.rank() * self.num_gemms + i
            own = {f"{i}.{name}": getattr(self, f"{name}{i}") for name in names}
            tensors = make_sharded_tensors_for_checkpoint(
                {**own, f"{i}._extra_state": None},
                "",
                {f"{i}.{name}": self.split_axis for name in cut},
                (*sharded_offsets, (len(sharded_offsets), expert, num_experts)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(tensors, f"{i}.", prefix)
            for name in names:
                result[f"{prefix}{name}{i}"] = tensors[f"{i}.{name}"]
            result[f"{prefix}_extra_state{i or ''}"] = tensors[f"{i}._extra_state"]
        for tensor in result.values():
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
        return result


class TorchColumnGroupedLinear(_GroupedLinear):
    split_axis = 0


class TorchRowGroupedLinear(_GroupedLinear):
    split_axis = 1


class TorchSpecProvider(BackendSpecProvider):
    """Which class plays which part."""

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
            linear_fc1=TorchColumnGroupedLinear, linear_fc2=TorchRowGroupedLinear
        )

    def activation_func(self) -> None:
        return None


def torch_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's own decoder block for Transformer Engine, with the torch parts in it.

    Megatron hard-codes the provider in module globals; they are ours while it builds the spec.
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
