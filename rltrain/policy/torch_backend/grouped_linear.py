"""The linear maps of all local experts as one: a launch for all of them, not one for each.

Transformer Engine's grouped linear launches a product per expert, in three directions, and Megatron
then adds a gradient per expert: with 128 experts the host is busy for longer than the GPU. Here the
experts' weights lie end to end in memory, so that torch's ``grouped_mm`` and one addition do. The
parameters, their names and their checkpoint are Transformer Engine's.
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
"""What must divide the bytes of a row for ``grouped_mm``."""


class GroupedLinear(torch.nn.Module):
    """One linear map per local expert, ``weight{i}`` of shape [out, in], perhaps with ``bias{i}``.

    The dispatcher has gathered what the expert needs over the expert-tensor group and will reduce
    what it returns, so there is no communication in here.
    """

    split_axis: int
    into_main_grad = False
    """Add the weights' gradients to Megatron's ``main_grad`` in one go. No hook runs then."""
    announce: Callable[[Tensor], Any] | None = None
    """Called for each weight whose gradient was added, in place of a hook that DDP waits for."""

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
        """x [tokens, in], sorted by expert; m_splits: how many are each expert's.

        Returns [tokens, out], and the biases where it is for the caller to add them.
        """
        biases = self._each("bias") if self.with_bias else None
        if not is_aligned(self._each("weight")[0].shape, x.dtype):
            out = self._one_by_one(x, m_splits)
        else:
            counts = torch.tensor(m_splits, dtype=torch.int32).to(x.device, non_blocking=True)
            out = self._at_once(x, counts.cumsum(0, dtype=torch.int32))
        if biases is not None and not self.skip_bias_add:
            rows = [bias.expand(n, -1) for bias, n in zip(biases, m_splits, strict=True)]
            out = out + torch.cat(rows)
        return out, biases if self.skip_bias_add else None

    def _at_once(self, x: Tensor, ends: Tensor) -> Tensor:
        weights = self._each("weight")
        if not (self.into_main_grad and torch.is_grad_enabled() and weights[0].requires_grad):
            return _Grouped.apply(x, ends, None, *weights)
        assert x.requires_grad, "the gradient of an expert comes with that of its input"
        return _Grouped.apply(x, ends, self)

    def _one_by_one(self, x: Tensor, m_splits: list[int]) -> Tensor:
        parts = zip(x.split(m_splits), self._each("weight"), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])

    def _each(self, name: str) -> list[Tensor]:
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


class ColumnGroupedLinear(GroupedLinear):
    split_axis = 0


class RowGroupedLinear(GroupedLinear):
    split_axis = 1


def is_aligned(sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether rows of so many numbers are what ``grouped_mm`` takes."""
    return all(size * dtype.itemsize % ALIGN_BYTES == 0 for size in sizes)


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape as one, ``[len(tensors), ...]``: a view where they lie so in memory."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    start, storage = first.data_ptr(), first.untyped_storage()
    lies_so = first.is_contiguous() and all(
        tensor.data_ptr() == start + i * step for i, tensor in enumerate(tensors)
    )
    # Neighbours of two storages are no tensor.
    if not lies_so or start + len(tensors) * step > storage.data_ptr() + storage.nbytes():
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
            module: whose weights' gradients go to their ``main_grad``, in place of ``weights``
        """
        ctx.save_for_backward(x, ends)
        ctx.module = module
        ctx.held = weights if module is None else module._each("weight")
        whole = end_to_end(ctx.held)
        if len(x) == 0:
            return x.new_empty(0, whole.shape[1])
        return F.grouped_mm(x, whole.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        whole = end_to_end(ctx.held)
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
    together = end_to_end(sums)
    if together.data_ptr() == sums[0].data_ptr():
        together.add_(gradients)
    else:
        torch._foreach_add_(sums, list(gradients.to(sums[0].dtype).unbind(0)))
