"""The critic's output layer: the value of the prefix that ends with each slot's token."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ValueHead(torch.nn.Module):
    """A linear map to a scalar, with the signature of `GPTModel.output_layer`, which it replaces.

    Every tensor-parallel rank has all of it and returns the values of all slots. It multiplies in
    fp32. Its weight starts at zero, so every value is 0 before the first update.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        zeros = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(zeros)
        # Each tensor-parallel rank sees its share of the slots, so Megatron must sum gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """[S, 1, H], under sequence parallelism [S / tp, 1, H] -> fp32 [S, 1, 1]"""
        assert weight is None, "a critic's embedding is not its head"
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # All ranks compute the same loss, so backward takes the gradient of this rank's slots.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
