"""The linear maps of all local experts in one kernel launch.

Transformer Engine's grouped linear launches one product per expert, forward and for two gradients,
and Megatron then adds one gradient per expert. With 128 experts the host needs longer than the GPU.
Here the experts' weights are contiguous in memory, so torch's ``grouped_mm`` and one addition are
enough. Parameters, their names and their checkpoint are the same as Transformer Engine's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor

ALIGN_BYTES = 16
"""``grouped_mm`` needs rows whose size in bytes is a multiple of this."""


class GroupedLinear(torch.nn.Module):
    """One linear map per local expert: ``weight{i}`` of shape [out, in], optionally ``bias{i}``.

    It does not communicate. The dispatcher gathers the inputs over the expert-tensor group before,
    and reduces the outputs after.
    """

    split_axis: int
    into_main_grad = False
    """Whether to add all weights' gradients to Megatron's ``main_grad`` at once, without hooks."""
    announce: Callable[[Tensor], Any] | None = None
    """Called for each weight after its gradient was added, in place of the hook of DDP."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
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
        device = torch.cuda.current_device()
        whole = torch.empty((num_gemms, *shape), dtype=config.params_dtype, device=device)
        # Megatron lays its buffers out from the last parameter to the first.
        for i in reversed(range(num_gemms)):
            weight = torch.nn.Parameter(whole[i])
            _initialize_affine_weight_gpu(weight, init_method, self.split_axis, is_expert=True)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                rows = torch.full_like(weight[:, 0], float("nan"))
                self.register_parameter(f"bias{i}", torch.nn.Parameter(rows))
        self._register_load_state_dict_pre_hook(self._drop_extra_states)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """x [tokens, in], sorted by expert; m_splits: the number of tokens of each expert.

        Returns [tokens, out], and the biases if the caller is to add them.
        """
        biases = self._parameters_of("bias") if self.with_bias else None
        if not is_aligned(self._parameters_of("weight")[0].shape, x.dtype):
            out = self._one_by_one(x, m_splits)
        else:
            counts = torch.tensor(m_splits, dtype=torch.int32).to(x.device, non_blocking=True)
            out = self._at_once(x, counts.cumsum(0, dtype=torch.int32))
        if biases is not None and not self.skip_bias_add:
            rows = [bias.expand(n, -1) for bias, n in zip(biases, m_splits, strict=True)]
            out = out + torch.cat(rows)
        return out, biases if self.skip_bias_add else None

    def _at_once(self, x: Tensor, ends: Tensor) -> Tensor:
        weights = self._parameters_of("weight")
        if not (self.into_main_grad and torch.is_grad_enabled() and weights[0].requires_grad):
            return _Grouped.apply(x, ends, None, *weights)
        assert x.requires_grad, "experts get a gradient only if their input does"
        return _Grouped.apply(x, ends, self)

    def _one_by_one(self, x: Tensor, m_splits: list[int]) -> Tensor:
        parts = zip(x.split(m_splits), self._parameters_of("weight"), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])

    def _parameters_of(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}{i}") for i in range(self.num_gemms)]

    def get_extra_state(self) -> None:
        """Empty. Transformer Engine keeps FP8 state here, and checkpoints have the key."""

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
        split_names = names if self.split_axis == 0 else ["weight"]
        for i in range(self.num_gemms):
            expert = self.groups.ep.rank() * self.num_gemms + i
            values = {f"{i}.{name}": getattr(self, f"{name}{i}") for name in names}
            tensors = make_sharded_tensors_for_checkpoint(
                {**values, f"{i}._extra_state": None},
                "",
                {f"{i}.{name}": self.split_axis for name in split_names},
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


class ColumnGroupedLinear(GroupedLinear):
    split_axis = 0


class RowGroupedLinear(GroupedLinear):
    split_axis = 1


def is_aligned(sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether ``grouped_mm`` takes rows of these sizes."""
    return all(size * dtype.itemsize % ALIGN_BYTES == 0 for size in sizes)


def stack_or_view(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one shape, ``[len(tensors), ...]``: as a view if they are contiguous."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    start, storage = first.data_ptr(), first.untyped_storage()
    contiguous = first.is_contiguous() and all(
        tensor.data_ptr() == start + i * step for i, tensor in enumerate(tensors)
    )
    # Two storages can be neighbours, but a view cannot span them.
    if not contiguous or start + len(tensors) * step > storage.data_ptr() + storage.nbytes():
        return torch.stack([tensor.detach() for tensor in tensors])
    shape = (len(tensors), *first.shape)
    return first.detach().as_strided(shape, (first.numel(), *first.stride()))


class _Grouped(torch.autograd.Function):
    """y[t] = weight[expert of t] @ x[t]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Tensor, module: GroupedLinear | None, *weights: Tensor
    ) -> Tensor:
        """
        Args:
            x: sorted by expert  # [T, in]
            ends: where each expert's rows end, int32  # [E]
            module: in place of ``weights``: its weights' gradients are added to ``main_grad``
        """
        ctx.save_for_backward(x, ends)
        ctx.module = module
        ctx.held = weights if module is None else module._parameters_of("weight")
        whole = stack_or_view(ctx.held)
        if len(x) == 0:
            return x.new_empty(0, whole.shape[1])
        return F.grouped_mm(x, whole.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        whole = stack_or_view(ctx.held)
        to_x = F.grouped_mm(grad, whole, offs=ends) if len(x) else torch.zeros_like(x)
        if not ctx.held[0].requires_grad:
            assert ctx.module is None
            return to_x, None, None, *[None] * len(ctx.held)
        to_weights = F.grouped_mm(grad.t(), x, offs=ends) if len(x) else torch.zeros_like(whole)
        if ctx.module is None:
            return to_x, None, None, *to_weights.unbind(0)
        _add_to_main_grads(ctx.held, to_weights)
        if ctx.module.announce is not None:
            for weight in ctx.held:
                ctx.module.announce(weight)
        return to_x, None, None


def _add_to_main_grads(weights: Sequence[Any], gradients: Tensor) -> None:
    sums = [weight.main_grad for weight in weights]
    stacked = stack_or_view(sums)
    if stacked.data_ptr() == sums[0].data_ptr():
        stacked.add_(gradients)
    else:
        torch._foreach_add_(sums, list(gradients.to(sums[0].dtype).unbind(0)))
