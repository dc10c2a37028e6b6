"""On which node and GPU every rank of a run computes. Pure: it knows no Ray."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rltrain.planning.nodes import LOCAL, Slot


@dataclass(frozen=True)
class Placement:
    """Where every rank of policy, critic and engine is."""

    device: Literal["cpu", "cuda"]
    nodes: tuple[str, ...] = ()
    """The addresses of those that have ranks."""
    policy: tuple[Slot, ...] = ()
    """By rank."""
    critic: tuple[Slot, ...] = ()
    engines: tuple[tuple[Slot, ...], ...] = ()
    """By engine, the places of its ranks."""

    @cached_property
    def slots(self) -> frozenset[Slot]:
        return frozenset((*self.policy, *self.critic, *(s for e in self.engines for s in e)))

    @property
    def num_gpus(self) -> int:
        return len(self.slots) if self.device == "cuda" else 0

    def gpus_on(self, node: str) -> int:
        """Number of GPUs that the run has on a node; they are called 0, 1 and so on."""
        return len([s for s in self.slots if s.node == node and s.gpu is not None])

    @property
    def colocated(self) -> bool:
        """Whether engines share GPUs with the policy, and so alternate with it."""
        policy = {slot for slot in self.policy if slot.gpu is not None}
        return any(slot in policy for engine in self.engines for slot in engine)

    def __str__(self) -> str:
        if self.device == "cpu" and self.nodes in ((), (LOCAL,)):
            return "all ranks on this machine's CPUs"
        colocated = ", colocated" if self.colocated else ""
        if self.device == "cpu":
            total = f"CPUs of {len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"
        else:
            total = f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)}"
        if self.nodes == (LOCAL,):
            return f"{total}: {self._on(self.nodes[0])}{colocated}"
        parts = [f"{node}: {self._on(node)}" for node in self.nodes]
        return f"{total}{colocated}: " + " | ".join(parts)

    def _on(self, node: str) -> str:
        engines = [slot for engine in self.engines for slot in engine]
        groups = {"policy": self.policy, "critic": self.critic, "engines": engines}
        if self.device == "cpu":
            numbers = {name: _numbers(slots, node) for name, slots in groups.items()}
            numbers["engines"] = [n for n, e in enumerate(self.engines) if e[0].node == node]
            return "; ".join(f"{name} {_listed(found)}" for name, found in numbers.items() if found)
        return "; ".join(
            f"{name} on {_listed(sorted(gpus))}"
            for name, slots in groups.items()
            if (gpus := {s.gpu for s in slots if s.node == node and s.gpu is not None})
        )


def _numbers(slots: Sequence[Slot], node: str) -> list[int]:
    return [n for n, slot in enumerate(slots) if slot.node == node]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
