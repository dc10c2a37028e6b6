"""RMSNorm of queries or keys over all heads together, which Megatron does not have.

Megatron's ``q_layernorm`` normalizes one head, and every rank holds all of it. This one is sharded
over tensor-parallel ranks, as the heads are. It is the same with and without Transformer Engine.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide

from rltrain.weights.architecture.decoder import Architecture


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm over the ``num_heads`` heads of all tensor-parallel ranks, of size ``hidden_size``.

    ``weight`` is that of this rank's heads, one after another.
    """

    def __init__(
        self, num_heads: int, hidden_size: int, config: TransformerConfig, eps: float
    ) -> None:
        super().__init__()
        self.eps = eps
        self.size = num_heads * hidden_size
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        local_size = divide(num_heads, self.tp_group.size()) * hidden_size
        self.weight = torch.nn.Parameter(
            torch.ones(local_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Every rank sees all tokens here, and no two ranks have the same heads.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, 1, this rank's heads, hidden_size]. Returns the same shape."""
        flat = x.float().flatten(-2)
        squares = flat.square().sum(dim=-1, keepdim=True)
        # Forward adds the sums of all ranks. Backward adds the gradients of the total of all ranks.
        squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = flat * torch.rsqrt(squares / self.size + self.eps)
        return (normed.to(x.dtype) * self.weight).view(x.shape)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def norm_all_heads(block: TransformerBlockSubmodules, arch: Architecture) -> None:
    """Put the norms into the attention of every layer of ``block``.

    ``config.qk_layernorm`` must be False. If it is True, Megatron sums the gradients of all
    parameters named ``q_layernorm`` or ``k_layernorm`` over tensor-parallel ranks.
    """
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = ModuleSpec(AllHeadsNorm, params={"num_heads": arch.num_heads})
        attention.k_layernorm = ModuleSpec(AllHeadsNorm, params={"num_heads": arch.num_kv_heads})
