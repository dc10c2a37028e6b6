"""Whose turn it is on the GPUs that engines share with policy and critic.

While the engines generate, the learners' memory waits on the host; while the learners compute, the
engines sleep (vLLM's sleep mode). Both are there during a weight sync alone, and of the policy its
parameters only. Where nothing is shared nobody waits, and on CPUs neither.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rltrain.controller.cluster.engines import call_all
from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.tracking.timers import StepTimer

PARAMETERS = ("parameters",)
REST = ("gradients", "optimizer", "reference")


@dataclass(frozen=True)
class Colocation:
    """A run begins in training's turn, with engines asleep, and takes one turn after the other."""

    colocated: bool
    policy: WorkerGroup
    critic: WorkerGroup | None
    engines: Sequence[Any]
    timeout_s: float

    def to_training(self, timer: StepTimer, *, will_sync: bool) -> None:
        """Engines to learners.

        Args:
            will_sync: whether this turn ends with a weight sync, so that the engines need not keep
                the weights they have
        """
        if not self.colocated:
            return
        with timer.phase("engine_sleep"):
            self._tell_engines("sleep", 2 if will_sync else 1)
        with timer.phase("onload"):
            self._tell_learners("onload", PARAMETERS + REST)

    def to_engines(self, timer: StepTimer) -> None:
        """Learners to engines that kept their weights."""
        if not self.colocated:
            return
        with timer.phase("offload"):
            self._tell_learners("offload", PARAMETERS + REST)
        with timer.phase("engine_wake"):
            self._tell_engines("wake", ("weights", "kv_cache"))

    @contextmanager
    def weight_sync(self, timer: StepTimer) -> Iterator[None]:
        """Learners to engines, whose new weights come inside."""
        if self.colocated:
            with timer.phase("offload"):
                self._tell_learners("offload", REST)
                if self.critic is not None:
                    self.critic.call("offload", PARAMETERS)
            with timer.phase("engine_wake"):
                self._tell_engines("wake", ("weights",))
        with timer.phase("weight_sync"):
            yield
        if self.colocated:
            with timer.phase("offload"):
                self.policy.call("offload", PARAMETERS)
            with timer.phase("engine_wake"):
                self._tell_engines("wake", ("kv_cache",))

    @contextmanager
    def engines_aside(self) -> Iterator[None]:
        """In the engines' turn: inside, their GPUs are free."""
        self._tell_engines("sleep", 1)
        yield
        self._tell_engines("wake", ("weights", "kv_cache"))

    @contextmanager
    def parameters_back(self) -> Iterator[None]:
        """In the engines' turn, with these aside: inside, the policy's parameters are there."""
        if self.colocated:
            self.policy.call("onload", PARAMETERS)
        yield
        if self.colocated:
            self.policy.call("offload", PARAMETERS)

    def _tell_engines(self, method: str, argument: Any) -> None:
        call_all(self.engines, method, self.timeout_s, argument)

    def _tell_learners(self, method: str, parts: Sequence[str]) -> None:
        for group in (self.policy, self.critic):
            if group is not None:
                group.call(method, parts)
