"""The controller's handle on the critic."""

from typing import TYPE_CHECKING

from torch import Tensor

from rltrain.batch import Batch
from rltrain.controller.cluster.worker_group import WorkerGroup
from rltrain.policy.types import Updated

if TYPE_CHECKING:  # see `WorkerGroup`
    from rltrain.policy.critic import CriticWorker  # noqa: F401  # ruff sees no base class


class CriticGroup(WorkerGroup["CriticWorker"]):
    """All critic workers as one. They are laid out like the policy's and work by the same plan."""

    role = "critic"

    def begin_step(self, batch: Batch) -> None:
        """As `WorkerGroup.begin_step`; the critic gets no routes."""
        super().begin_step(batch.with_fields(rollout_expert_indices=None, route_mask=None))

    def values(self) -> Tensor:
        """V of the prefix before every token of the whole batch; 0 for first tokens.  # [N]"""
        return self._unshard(
            [values for (values,) in self._score(lambda worker, plan: worker.values(plan))]
        )

    def update(self, fields: dict[str, Tensor]) -> list[Updated]:
        """One optimizer update per mini-batch that has a token in the loss.

        Args:
            fields: ``values``, ``returns`` and ``loss_weights`` of the whole batch  # [N] each
        """
        return self._update(fields, lambda worker, plan, shard: worker.update(plan, shard))
