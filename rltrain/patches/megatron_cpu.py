"""Patches with which Megatron-core runs on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from rltrain.patches.megatron import MEGATRON, patch_megatron
from rltrain.patches.registry import Patch, apply

_TORCH = (("torch",), ">=2.11,<2.14")
_CPU_SUPPORT = "Megatron-core runs without CUDA"


class NullStream:
    """Takes the place of a CUDA stream. On a CPU, work is done when the call returns."""

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
    """An event. Not `NullStream` itself: `registry.apply` marks each replacement."""


_NULL_STREAM = NullStream()


def _returning(make: Callable[..., Any]) -> Callable[[Any], Any]:
    """A wrapper that replaces the original by ``make``."""
    return lambda original: lambda *args, **kwargs: make(*args, **kwargs)


def _first_argument(*args: Any, **kwargs: Any) -> Any:
    return args[0]


def _on_cpu(original: Any) -> Any:
    """A tensor factory that reads device="cuda" as the CPU and ignores ``pin_memory``."""

    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _cuda_type_name(original: Any) -> Any:
    """``Tensor.type()`` with the name of the CUDA type, which the optimizer compares with."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_


def _splits_as_numpy(original: Any) -> Any:
    """Split sizes as an array: the CPU all-to-all takes no tensor."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def _gather_unequal(original: Any) -> Any:
    """An all-gather by all-to-all: gloo's all-gather requires equally many rows on each rank."""

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
    """A reduce-scatter by all-to-all and a sum: gloo's reduce-scatter requires equal parts."""

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
        local_size = sizes[group.rank()]
        received = input_.new_empty(local_size * size, *input_.shape[1:])
        torch.distributed.all_to_all_single(
            received, input_.contiguous(), [local_size] * size, sizes, group
        )
        return received.view(size, local_size, *input_.shape[1:]).sum(0)

    return _reduce_scatter_along_first_dim


def _torch_cpu(name: str, params: tuple[str, ...] | None, reason: str, wrap: Any) -> Patch:
    return Patch(*_TORCH, f"torch{name}", params, reason, _CPU_SUPPORT, wrap)


def _megatron_cpu(name: str, params: tuple[str, ...], reason: str, wrap: Any) -> Patch:
    return Patch(*MEGATRON, f"megatron.core.{name}", params, reason, _CPU_SUPPORT, wrap)


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
