"""Whether the numbers of an update are finite. All ranks come to the same answer.

A gradient that is NaN on one rank is so on all that it is reduced over; a loss is each rank's own.
So the ranks tell each other both, and decide by what all of them told.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.policy.types import NonFinite

SHOWN = 3
"""Parameters in a message."""


class NotFinite(FloatingPointError):
    """An update was not made, on any rank."""

    def __init__(self, found: NonFinite) -> None:
        super().__init__(f"{found}. Nothing was updated [RL5005]")
        self.found = found


def first_nonfinite(
    loss: float, norm: float, chunks: Sequence[torch.nn.Module]
) -> NonFinite | None:
    """The loss, or else the gradient norm, that is not finite on some rank. Collective.

    Args:
        loss, norm: of this rank
        chunks: with the gradients of which ``norm`` is
    """
    told = _from_all_ranks(loss, norm)
    for quantity, values in zip(("loss", "gradient norm"), told.T.tolist(), strict=True):
        bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
        if bad and quantity == "loss":
            return NonFinite(quantity, values[bad[0]], tuple(bad))
        if bad:
            return NonFinite(quantity, values[bad[0]], detail=_which_gradients(chunks))
    return None


def nonfinite_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the tensors that hold NaN or infinity. Reads each once, and waits for a device
    once."""
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.numel():
            by_device.setdefault(tensor.device, []).append((name, tensor.detach()))
    bad = []
    for there in by_device.values():
        # The largest magnitude, which is NaN where one is.
        largest = torch._foreach_norm([tensor for _, tensor in there], ord=math.inf)
        finite = torch.stack([value.float() for value in largest]).isfinite().tolist()
        bad += [name for (name, _), is_finite in zip(there, finite, strict=True) if not is_finite]
    return bad


def gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Those that this rank holds after its backward passes."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if parameter.requires_grad and gradient is not None:
                yield name.removeprefix("module."), gradient


def _from_all_ranks(loss: float, norm: float) -> Tensor:
    """What each rank has.  # [ranks, 2]"""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    own = torch.tensor([loss, norm], dtype=torch.float64, device=device)
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    return torch.stack(told).cpu()


def _which_gradients(chunks: Sequence[torch.nn.Module]) -> str:
    """Collective."""
    own = list(gradients(chunks))
    largest = max(
        ((float(g.abs().amax()), name) for name, g in own if g.numel()), default=(0.0, "")
    )
    told: list[tuple[list[str], tuple[float, str]]] = [([], (0.0, ""))] * dist.get_world_size()
    dist.all_gather_object(told, (nonfinite_names(own), largest))
    bad = [f"{name} (rank {rank})" for rank, (names, _) in enumerate(told) for name in names]
    if not bad:
        value, name = max(of_rank for _, of_rank in told)
        return f"every gradient is finite, but their squares: the largest is {value:.3g}, of {name}"
    more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"so are gradients of {', '.join(bad[:SHOWN])}{more}"
