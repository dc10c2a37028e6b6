"""What is on GPUs that engines and trainer share, at every moment of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rltrain.controller.cluster.colocation import Colocation
from rltrain.tracking.timers import StepTimer

PARTS = ("parameters", "gradients", "optimizer", "reference")


@dataclass
class Memory:
    """What lies on the GPUs; nobody may take what is not free."""

    there: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    """What engines that sleep can bring back."""

    def onload(self, who: str, parts: Sequence[str]) -> None:
        named = {f"{who} {part}" for part in parts}
        assert not named & self.there
        self.there |= named
        self.check()

    def offload(self, who: str, parts: Sequence[str]) -> None:
        named = {f"{who} {part}" for part in parts}
        assert named <= self.there, f"{named} of {self.there}"
        self.there -= named
        self.check()

    def sleep(self, level: int) -> None:
        assert {"weights", "kv_cache"} <= self.there
        self.there -= {"weights", "kv_cache"}
        self.kept = {"weights"} if level == 1 else set()
        self.check()

    def wake(self, parts: Sequence[str]) -> None:
        assert not set(parts) & self.there
        self.there |= set(parts)
        self.check()

    def check(self) -> None:
        trainer = self.there - {"weights", "kv_cache"}
        if "kv_cache" in self.there:
            assert not trainer
        if "weights" in self.there:
            assert trainer <= {"policy parameters"}


@dataclass
class Group:
    name: str
    memory: Memory

    def onload(self, parts: Sequence[str]) -> None:
        self.memory.onload(self.name, parts)

    def offload(self, parts: Sequence[str]) -> None:
        self.memory.offload(self.name, parts)


def colocation(memory: Memory, *names: str, colocated: bool) -> Colocation:
    """Of groups and engines that have nothing but memory."""
    policy, *critic = (Group(name, memory) for name in names)
    groups: Any = policy, (critic[0] if critic else None), memory
    return Colocation(colocated, *groups)


def trainer_parts(*names: str) -> set[str]:
    return {f"{name} {part}" for name in names for part in PARTS}


@pytest.mark.parametrize("has_critic", [False, True])
def test_trainer_and_engines_are_never_there_at_once(has_critic: bool) -> None:
    names = ("policy", "critic") if has_critic else ("policy",)
    memory = Memory(trainer_parts(*names))
    taken = colocation(memory, *names, colocated=True)
    engines = {"weights", "kv_cache"}

    timer = StepTimer()
    syncs = [True, False, True]  # the first one at the start, with sleeping engines
    for will_sync, will_sync_next in zip(syncs, [*syncs[1:], False], strict=True):
        if will_sync:
            assert not memory.kept  # a sync follows, so old weights are not kept
            with taken.weight_sync(timer):
                assert memory.there == {"policy parameters", "weights"}
        else:
            taken.to_engines(timer)
            assert "weights" in memory.kept
        assert memory.there == engines
        taken.to_training(timer, will_sync=will_sync_next)
        assert memory.there == trainer_parts(*names)
    taken.to_engines(timer)
    phases = {"engine_sleep", "onload", "offload", "engine_wake", "weight_sync", "other", "step"}
    assert timer.metrics().keys() == {f"time/{phase}" for phase in phases}

    with taken.engines_aside():
        assert memory.there == set() and memory.kept == {"weights"}
        with taken.parameters_back():
            assert memory.there == {"policy parameters"}
        assert memory.there == set()
    assert memory.there == engines


def test_nobody_waits_where_nothing_is_shared() -> None:
    taken = colocation(Memory(), "policy", colocated=False)  # any call would find nothing there
    timer = StepTimer()
    taken.to_training(timer, will_sync=True)
    with taken.weight_sync(timer):
        pass
    taken.to_engines(timer)
    assert timer.metrics().keys() == {"time/weight_sync", "time/other", "time/step"}
