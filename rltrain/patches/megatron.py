"""Patches of Megatron-core: silent errors of it, and what it needs to run on a CPU.

Every worker process calls ``patch_megatron``, on CPU or GPU. A CPU worker process calls
``patch_megatron_for_cpu`` in addition, before it builds a model.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from rltrain.patches.registry import Patch, apply
from rltrain.routing.expert_groups import BEST_OF_GROUP, score_groups, within_groups

_MEGATRON = (("megatron-core",), "==0.16.1")
_TORCH = (("torch",), ">=2.11,<2.14")
_CPU_SUPPORT = "Megatron-core runs without CUDA"


class NullStream:
    """Stands for a CUDA stream where all work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> "NullStream":
        return self


class NullEvent(NullStream):
    """An event: a class of its own, since a patch marks what it puts in place."""


_NULL_STREAM = NullStream()


def _returning(make: Callable[..., Any]) -> Callable[[Any], Any]:
    """A wrapper that puts ``make`` in place of the original."""
    return lambda original: lambda *args, **kwargs: make(*args, **kwargs)


def _first_argument(*args: Any, **kwargs: Any) -> Any:
    return args[0]


def _on_cpu(original: Any) -> Any:
    """A tensor factory whose device="cuda" means the CPU, where no memory is pinned."""

    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _cuda_type_name(original: Any) -> Any:
    """``Tensor.type()`` in the spelling that the optimizer compares with."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_


def _splits_as_numpy(original: Any) -> Any:
    """CPU all-to-all wants its split sizes as a list or array, as Megatron makes them on a GPU."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _gather_unequal(original: Any) -> Any:
    """Every rank sends its rows to every other: gloo's all-gather wants equally many on each."""

    def _gather_along_first_dim(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        size = group.size()
        if size == 1 or output_split_sizes is None:
            return original(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(n) for n in output_split_sizes]
        output = input_.new_empty(sum(sizes), *input_.shape[1:])
        torch.distributed.all_to_all_single(
            output,
            input_.repeat(size, *[1] * (input_.ndim - 1)),
            sizes,
            [len(input_)] * size,
            group,
        )
        return output

    return _gather_along_first_dim


def _reduce_scatter_unequal(original: Any) -> Any:
    """Every rank sums what the others send it: gloo's reduce-scatter wants equal parts."""

    def _reduce_scatter_along_first_dim(
        input_: torch.Tensor,
        group: Any,
        input_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        size = group.size()
        if size == 1 or input_split_sizes is None:
            return original(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(n) for n in input_split_sizes]
        own = sizes[group.rank()]
        received = input_.new_empty(own * size, *input_.shape[1:])
        torch.distributed.all_to_all_single(
            received, input_.contiguous(), [own] * size, sizes, group
        )
        return received.view(size, own, *input_.shape[1:]).sum(0)

    return _reduce_scatter_along_first_dim


def _router_linear(original: Any) -> Any:
    def router_gating_linear(
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        router_dtype: torch.dtype,
    ) -> torch.Tensor:
        bias = None if bias is None else bias.to(router_dtype)
        return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), bias)

    return router_gating_linear


def _no_fp8(original: Any) -> Any:
    def __init__(self: Any, fp8: Any = False) -> None:
        original(self, fp8)
        self.fp8 = bool(fp8)

    return __init__


def _own_steps(original: Any) -> Any:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    return load_state_dict


def _keep_step(original: Any) -> Any:
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        kept = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, {**kept, **tensors})

    return _set_main_param_and_optimizer_states


class _AmongGroups:
    """Stands before a router's replay, and brings it the choice among groups that is right."""

    def __init__(self, best: int, replay: Any) -> None:
        self.best = best
        self.replay = replay

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int, _: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.replay is None:
            return self._choose(scores, topk, num_groups, group_topk)
        found: tuple[torch.Tensor, torch.Tensor] = self.replay.get_replay_topk(
            scores, topk, num_groups, group_topk, self._choose
        )
        return found

    def _choose(
        self, scores: torch.Tensor, topk: int, num_groups: int, group_topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_groups = score_groups(scores, num_groups, self.best)
        values, experts = within_groups(scores, of_groups, group_topk).topk(topk, dim=1)
        return values, experts


def _best_of_group(original: Any) -> Any:
    def topk_routing_with_score_function(
        logits: torch.Tensor,
        topk: int,
        *,
        group_topk: int | None = None,
        score_function: str = "softmax",
        router_replay: Any = None,
        **kwargs: Any,
    ) -> Any:
        if group_topk:
            router_replay = _AmongGroups(BEST_OF_GROUP[score_function], router_replay)
        return original(
            logits,
            topk,
            group_topk=group_topk,
            score_function=score_function,
            router_replay=router_replay,
            **kwargs,
        )

    return topk_routing_with_score_function


def _torch_cpu(name: str, params: tuple[str, ...] | None, reason: str, wrap: Any) -> Patch:
    return Patch(*_TORCH, f"torch{name}", params, reason, _CPU_SUPPORT, wrap)


def _megatron_cpu(name: str, params: tuple[str, ...], reason: str, wrap: Any) -> Patch:
    return Patch(*_MEGATRON, f"megatron.core.{name}", params, reason, _CPU_SUPPORT, wrap)


CPU_PATCHES = (
    _torch_cpu(
        ".cuda:current_device", (), "device= of buffers", _returning(lambda: torch.device("cpu"))
    ),
    _torch_cpu(".cuda:Stream", None, "the dispatcher's copy stream", lambda original: NullStream),
    _torch_cpu(".cuda:Event", None, "events on that stream", lambda original: NullEvent),
    _torch_cpu(
        ".cuda:current_stream", ("device",), "waits", _returning(lambda device=None: _NULL_STREAM)
    ),
    _torch_cpu(
        ".cuda:default_stream", ("device",), "waits", _returning(lambda device=None: _NULL_STREAM)
    ),
    _torch_cpu(".cuda:stream", ("stream",), "contexts", _returning(lambda stream: nullcontext())),
    _torch_cpu(".cuda:synchronize", ("device",), "barriers", _returning(lambda device=None: None)),
    _torch_cpu(
        ".cuda:get_rng_state",
        ("device",),
        "the random state tracker",
        _returning(lambda device="cuda": torch.get_rng_state()),
    ),
    _torch_cpu(".cuda:manual_seed", ("seed",), "the same", _returning(torch.manual_seed)),
    _torch_cpu(":Tensor.cuda", None, "moves to the device", _returning(_first_argument)),
    _torch_cpu(":nn.Module.cuda", ("self", "device"), "the same", _returning(_first_argument)),
    _torch_cpu(":Tensor.record_stream", None, "stream lifetimes", _returning(lambda *_: None)),
    _torch_cpu(":Tensor.type", None, "the optimizer compares its text", _cuda_type_name),
    _torch_cpu(":tensor", None, 'device="cuda" in optimizer and schedules', _on_cpu),
    _torch_cpu(":zeros", None, 'device="cuda" in optimizer and schedules', _on_cpu),
    _megatron_cpu(
        "tensor_parallel.random:_get_cuda_rng_state",
        ("device", "clone", "graph_safe"),
        "the random state tracker",
        _returning(lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()),
    ),
    _megatron_cpu(
        "tensor_parallel.random:_set_cuda_rng_state",
        ("new_state", "device", "graph_safe"),
        "the random state tracker",
        _returning(lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)),
    ),
    _megatron_cpu(
        "transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        ("tensor", "as_numpy", "record_stream"),
        "split sizes of the all-to-all",
        _splits_as_numpy,
    ),
    _megatron_cpu(
        "tensor_parallel.mappings:_gather_along_first_dim",
        ("input_", "group", "output_split_sizes", "use_global_buffer"),
        "expert tensor parallelism gathers unequal parts, which gloo cannot",
        _gather_unequal,
    ),
    _megatron_cpu(
        "tensor_parallel.mappings:_reduce_scatter_along_first_dim",
        ("input_", "group", "input_split_sizes", "use_global_buffer"),
        "its counterpart",
        _reduce_scatter_unequal,
    ),
)

CHECKPOINT_WITHOUT_TE = Patch(
    *_MEGATRON,
    "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
    ("self", "fp8"),
    "takes its default fp8=False for FP8, and FP8GlobalStateManager is an undefined name where "
    "Transformer Engine is not installed: recomputing layernorm or moe_act is a NameError",
    "CheckpointWithoutOutput tells False from None",
    _no_fp8,
)

ROUTER_WITHOUT_TE = Patch(
    *_MEGATRON,
    "megatron.core.transformer.moe.router:router_gating_linear",
    ("inp", "weight", "bias", "router_dtype"),
    "te_general_gemm is an undefined name where Transformer Engine is not installed",
    "moe_utils defines te_general_gemm without Transformer Engine",
    _router_linear,
)

GROUPS = Patch(
    *_MEGATRON,
    "megatron.core.transformer.moe.router:topk_routing_with_score_function",
    (
        "logits",
        "topk",
        "use_pre_softmax",
        "num_groups",
        "group_topk",
        "scaling_factor",
        "score_function",
        "expert_bias",
        "fused",
        "router_replay",
    ),
    "scores a group by its best topk // group_topk experts. DeepSeek-V2 scores it by the best one "
    "and V3 by the best two, whatever that quotient is (V2: 6 experts of 3 groups)",
    "the number of experts that score a group is an option",
    _best_of_group,
)

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
TORCH_ADAM_PATCHES = (
    Patch(
        *_MEGATRON,
        f"{_OPTIMIZER}.load_state_dict",
        ("self", "state_dict"),
        "all states of torch's Adam share one step tensor after loading, which then counts every "
        "parameter as a step: wrong bias correction, no error",
        "load_state_dict makes a step tensor per state",
        _own_steps,
    ),
    Patch(
        *_MEGATRON,
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        ("self", "model_param", "tensors"),
        "it reads the step of torch's Adam from a checkpoint that keeps it elsewhere: KeyError",
        "keys that the checkpoint lacks are skipped",
        _keep_step,
    ),
)


def patch_megatron() -> None:
    """Corrections every worker process needs."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        apply(ROUTER_WITHOUT_TE)
        apply(CHECKPOINT_WITHOUT_TE)
    for patch in (GROUPS, *TORCH_ADAM_PATCHES):
        apply(patch)


def patch_megatron_for_cpu() -> None:
    """Let Megatron-core run in this process without CUDA. For CPU worker processes only."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "patch_megatron_for_cpu() in a process that sees a GPU would hide the GPU from all "
            "other code of the process: set CUDA_VISIBLE_DEVICES='' for CPU workers"
        )
    for patch in CPU_PATCHES:
        apply(patch)
    # Megatron decorates small functions with torch.compile, which costs more than it saves here.
    torch.compiler.set_stance("force_eager")
    patch_megatron()
