"""Colocation: engines and workers alternate on shared GPUs.

While the engines generate, the memory of policy and critic is offloaded to the host. While policy
and critic compute, the engines sleep (vLLM's sleep mode). During a weight sync the engines and the
policy's parameters are on the GPUs together. Where no GPU is shared, nothing is offloaded.
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
    """Moves memory between engines and workers. A run begins with the engines asleep."""

    colocated: bool
    policy: PolicyGroup
    critic: CriticGroup | None
    engines: Engines

    @property
    def _learners(self) -> "list[PolicyGroup | CriticGroup]":
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def to_training(self, timer: StepTimer, *, will_sync: bool) -> None:
        """From generation to training: engines sleep, workers are onloaded.

        Args:
            will_sync: whether a weight sync ends the training phase; the engines then need not keep
                their weights
        """
        if not self.colocated:
            return
        with timer.phase("engine_sleep"):
            self.engines.sleep(2 if will_sync else 1)
        with timer.phase("onload"):
            for group in self._learners:
                group.onload(PARAMETERS + REST)

    def to_engines(self, timer: StepTimer) -> None:
        """From training to generation, with the weights that the engines kept."""
        if not self.colocated:
            return
        with timer.phase("offload"):
            for group in self._learners:
                group.offload(PARAMETERS + REST)
        with timer.phase("engine_wake"):
            self.engines.wake(("weights", "kv_cache"))

    @contextmanager
    def weight_sync(self, timer: StepTimer) -> Iterator[None]:
        """From training to generation; the caller sends new weights inside the block."""
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
        """During generation: inside the block the engines sleep and their GPUs are free."""
        self.engines.sleep(1)
        yield
        self.engines.wake(("weights", "kv_cache"))

    @contextmanager
    def parameters_back(self) -> Iterator[None]:
        """Within `engines_aside`: inside the block the policy's parameters are onloaded."""
        if self.colocated:
            self.policy.onload(PARAMETERS)
        yield
        if self.colocated:
            self.policy.offload(PARAMETERS)
