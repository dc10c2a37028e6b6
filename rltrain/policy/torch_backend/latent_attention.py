"""Multi-head latent attention in pure torch.

Megatron's class needs one linear layer of Transformer Engine, which it refers to by name.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchDuplicatedLinear(torch.nn.Module):
    """A linear map that every tensor-parallel rank holds whole and applies to its tokens."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        parallel_mode: str,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated", parallel_mode
        assert not (bias or skip_bias_add or skip_weight_param_allocation or is_expert)
        self.weight = torch.nn.Parameter(
            torch.empty(
                output_size,
                input_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )
        init_method(self.weight)
        # Each tensor-parallel rank sees its share of the tokens, so Megatron must sum gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """Empty. Transformer Engine keeps FP8 state here, and checkpoints have the key."""

    def set_extra_state(self, state: Any) -> None: ...


class TorchMLASelfAttention(MLASelfAttention):
    """Megatron's class with `TorchDuplicatedLinear` in place of ``TELinear``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        theirs = multi_latent_attention.TELinear
        try:
            # Megatron compares with this class to know how to call a projection.
            multi_latent_attention.TELinear = TorchDuplicatedLinear
            super().__init__(*args, **kwargs)
        finally:
            multi_latent_attention.TELinear = theirs
