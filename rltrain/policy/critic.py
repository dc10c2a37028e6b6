"""The critic's worker: one Ray actor per rank of a Megatron world of its own.

The critic is the policy's model with a scalar in the place of the output layer, laid out like the
policy. It routes by itself: what the rollout engine chose is part of what the policy did, and a
value is about what it will be rewarded. So its routers are built without replay and no pass taps
them.
"""

from functools import cached_property

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rltrain.algorithms.objective import Sums, value_objective
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.policy.megatron_worker import MegatronWorker
from rltrain.policy.passes.micro_batch import MicroBatch
from rltrain.policy.passes.passes import ModelOnMesh, infer
from rltrain.policy.types import Plan, Updated
from rltrain.weights.families import read_architecture


class ValueModel(ModelOnMesh):
    """What a pass over a critic reads of it."""

    @cached_property
    def routers(self) -> list[dict[int, TopKRouter]]:
        """None is tapped."""
        return [{} for _ in self.chunks]

    def outputs(self, output: Tensor, target_ids: Tensor) -> tuple[Tensor, ...]:
        """The value of the prefix that ends with each slot.  # [1, S, 1] -> [S]"""
        return (output.view(-1),)


class CriticWorker(MegatronWorker):
    """One rank of the critic: its part of the model, the optimizer and a step's sequences."""

    def __init__(
        self,
        config: Config,
        rank: int,
        rendezvous: Rendezvous,
        model_path: str,
        device: torch.device,
    ) -> None:
        arch = read_architecture(model_path, config.model.mtp)
        super().__init__(
            config,
            arch.with_value_head(),
            config.critic.optimizer,
            rank,
            rendezvous,
            model_path,
            device,
            steps=config.trainer.steps,
        )
        self.model = ValueModel(self.chunks, self.arch, self.mesh, config.policy)

    def begin_step(self, shard: Batch) -> None:
        """Take this rank's sequences of the step, without their routes."""
        assert shard.rollout_expert_indices is None, "the critic never replays"
        shard.check_tokens(self.arch.vocab_size)
        self.shard = shard

    def values(self, plan: Plan) -> Tensor | None:
        """V of the prefix before every token of the shard; 0 for the first tokens.  # [N]"""
        shard = self._shard()
        values = infer(self.model, self._cut(plan, shard), shard.num_tokens)
        return values if self.mesh.is_output_rank else None

    def update(self, plan: Plan, fields: dict[str, Tensor]) -> Updated | None:
        """One optimizer update on the planned sequences.

        Args:
            fields: ``values`` before the step's updates, ``returns`` and ``loss_weights`` of the
                whole shard  # [N] each
        """
        shard = self._shard().with_fields(**fields)
        return self._take_step(self._accumulate(plan, shard, self._objective))

    def _objective(self, mb: MicroBatch, values: Tensor) -> tuple[Tensor, Sums]:
        old_values, returns, weights = mb.batch.require("values", "returns", "loss_weights")
        return value_objective(
            values,
            old_values=mb.at_targets(old_values),
            returns=mb.at_targets(returns),
            weights=mb.at_targets(weights),
            clip=self.config.critic.value_clip,
        )
