"""Who has memory on GPUs that engines and learners share, at every moment of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rltrain.controller.cluster import colocation as turns
from rltrain.controller.cluster.colocation import Colocation
from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.tracking.timers import StepTimer

PARTS = ("parameters", "gradients", "optimizer", "reference")


@dataclass
class Memory:
    """What lies on the GPUs; nobody may take what is not free."""

    there: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    """What engines that sleep can bring back."""

    def move(self, who: str, method: str, parts: Sequence[str]) -> None:
        named = {f"{who} {part}" for part in parts}
        if method == "onload":
            assert not named & self.there
            self.there |= named
        else:
            assert method == "offload" and named <= self.there, f"{named} of {self.there}"
            self.there -= named
        self.check()

    def call_all(
        self, engines: Sequence[Any], method: str, timeout_s: float, argument: Any
    ) -> None:
        assert engines == ["engine"] and timeout_s == 9
        if method == "sleep":
            assert {"weights", "kv_cache"} <= self.there
            self.there -= {"weights", "kv_cache"}
            self.kept = {"weights"} if argument == 1 else set()
        else:
            assert method == "wake" and not set(argument) & self.there
            self.there |= set(argument)
        self.check()

    def check(self) -> None:
        learners = self.there - {"weights", "kv_cache"}
        if "kv_cache" in self.there:
            assert not learners
        if "weights" in self.there:
            assert learners <= {"policy parameters"}


class Group(WorkerGroup):
    def __init__(self, name: str, memory: Memory) -> None:
        self.name, self.memory = name, memory

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.memory.move(self.name, method, *args)
        return []


def learners(*names: str) -> set[str]:
    return {f"{name} {part}" for name in names for part in PARTS}


@pytest.mark.parametrize("has_critic", [False, True])
def test_learners_and_engines_are_never_there_at_once(
    has_critic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("policy", "critic") if has_critic else ("policy",)
    memory = Memory(learners(*names))
    monkeypatch.setattr(turns, "call_all", memory.call_all)
    policy, *critic = (Group(name, memory) for name in names)
    taken = Colocation(True, policy, critic[0] if critic else None, ["engine"], 9)
    engines = {"weights", "kv_cache"}

    timer = StepTimer()
    syncs = [True, False, True]  # the first at the start, when the engines have slept from it
    for will_sync, will_sync_next in zip(syncs, [*syncs[1:], False], strict=True):
        if will_sync:
            assert not memory.kept  # by now they know better than to keep old weights
            with taken.weight_sync(timer):
                assert memory.there == {"policy parameters", "weights"}
        else:
            taken.to_engines(timer)
            assert "weights" in memory.kept
        assert memory.there == engines
        taken.to_training(timer, will_sync=will_sync_next)
        assert memory.there == learners(*names)
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
    memory = Memory()
    policy = Group("policy", memory)
    taken = Colocation(False, policy, None, [object()], 9)  # that no method can be called on
    timer = StepTimer()
    taken.to_training(timer, will_sync=True)
    with taken.weight_sync(timer):
        pass
    taken.to_engines(timer)
    assert timer.metrics().keys() == {"time/weight_sync", "time/other", "time/step"}
