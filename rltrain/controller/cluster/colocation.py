"""Whose turn it is on the GPUs that engines share with policy and critic.

While the engines generate, the learners' memory waits on the host; while the learners compute, the
engines sleep (vLLM's sleep mode). Both are there during a weight sync alone, and of the policy its
parameters only. Where nothing is shared nobody waits, and on CPUs neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rltrain.controller.cluster.critic_group import CriticGroup
from rltrain.controller.cluster.engines import Engines
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.tracking.timers import StepTimer

if TYPE_CHECKING:  # see `WorkerGroup`
    from rltrain.policy.offload import ModelPart

PARAMETERS: "tuple[ModelPart, ...]" = ("parameters",)
REST: "tuple[ModelPart, ...]" = ("gradients", "optimizer", "reference")


@dataclass(frozen=True)
class Colocation:
    """A run begins in training's turn, with engines asleep, and takes one turn after the other."""

    colocated: bool
    policy: PolicyGroup
    critic: CriticGroup | None
    engines: Engines

    @property
    def _learners(self) -> "list[PolicyGroup | CriticGroup]":
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def to_training(self, timer: StepTimer, *, will_sync: bool) -> None:
        """Engines to learners.

        Args:
            will_sync: whether this turn ends with a weight sync, so that the engines need not keep
                the weights they have
        """
        if not self.colocated:
            return
        with timer.phase("engine_sleep"):
            self.engines.sleep(2 if will_sync else 1)
        with timer.phase("onload"):
            for group in self._learners:
                group.onload(PARAMETERS + REST)

    def to_engines(self, timer: StepTimer) -> None:
        """Learners to engines that kept their weights."""
        if not self.colocated:
            return
        with timer.phase("offload"):
            for group in self._learners:
                group.offload(PARAMETERS + REST)
        with timer.phase("engine_wake"):
            self.engines.wake(("weights", "kv_cache"))

    @contextmanager
    def weight_sync(self, timer: StepTimer) -> Iterator[None]:
        """Learners to engines, whose new weights come inside."""
        if self.colocated:
            with timer.phase("offload"):
                for group in self._learners:
                    group.offload(REST)
                if self.critic is not None:
                    self.critic.offload(PARAMETERS)
            with timer.phase("engine_wake"):
                self.engines.wake(("weights",))
        with timer.phase("weight_sync"):
            yield
        if self.colocated:
            with timer.phase("offload"):
                self.policy.offload(PARAMETERS)
            with timer.phase("engine_wake"):
                self.engines.wake(("kv_cache",))

    @contextmanager
    def engines_aside(self) -> Iterator[None]:
        """In the engines' turn: inside, their GPUs are free."""
        self.engines.sleep(1)
        yield
        self.engines.wake(("weights", "kv_cache"))

    @contextmanager
    def parameters_back(self) -> Iterator[None]:
        """In the engines' turn, with these aside: inside, the policy's parameters are there."""
        if self.colocated:
            self.policy.onload(PARAMETERS)
        yield
        if self.colocated:
            self.policy.offload(PARAMETERS)
