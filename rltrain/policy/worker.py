"""The policy worker: one Ray actor per rank of the Megatron world.

The controller calls every method on all ranks at once; most are collective. A worker holds one
step's shard of sequences at a time, so routes reach it once and never leave: R3's come from the
object store, R2's from its own log-probability pass.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rltrain.algorithms.advantages import critic_only_steps
from rltrain.algorithms.objective import Sums, Targets, policy_objective, sft_objective
from rltrain.batch import Batch
from rltrain.config import Config
from rltrain.config.rollout import Transport
from rltrain.parallel.rendezvous import Rendezvous
from rltrain.parallel.token_layout import to_device
from rltrain.policy import model_checkpoint as checkpoint
from rltrain.policy.megatron.guards import native_losses
from rltrain.policy.megatron_worker import MegatronWorker
from rltrain.policy.offload import PartTensors, parameters_and_buffers
from rltrain.policy.passes.fetch_routes import fetch_and_count
from rltrain.policy.passes.locate import locate
from rltrain.policy.passes.micro_batch import MicroBatch
from rltrain.policy.passes.native_agreement import agree, kept_of_replayed
from rltrain.policy.passes.passes import ModelOnMesh, Recorded, Recorder, score
from rltrain.policy.passes.sequence_means import sequence_mean
from rltrain.policy.types import Place, Plan, StageScored, Updated
from rltrain.routing.align import last_rows
from rltrain.routing.codec import RouteIds, route_dtype
from rltrain.routing.flips import WideFlips, judged_rows, wide_flips
from rltrain.routing.links import FetchedObjects
from rltrain.routing.trace import check_refs, check_trace
from rltrain.weights.families import read_architecture
from rltrain.weights.huggingface.export import write_huggingface
from rltrain.weights.huggingface.manifest import ManifestEntry
from rltrain.weights.sync.broadcast import SENDER, BroadcastGroup, BroadcastSender, SenderLink
from rltrain.weights.sync.cuda_ipc import IpcSender, device_name
from rltrain.weights.sync.engine_fp8 import quantize_stream
from rltrain.weights.sync.gathering import Gathering
from rltrain.weights.sync.sender import full_tensors, stage_tensors
from rltrain.weights.sync.stream import BUCKET_BYTES, Bucket, BucketSender, BucketStream


class PolicyWorker(MegatronWorker):
    """One rank of the policy: its part of the model, the optimizer and a step's sequences."""

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
            arch,
            config.optimizer,
            rank,
            rendezvous,
            model_path,
            device,
            steps=config.trainer.steps - critic_only_steps(config),
        )
        self.model = self._on_mesh(self.chunks)
        self.reference = (
            self._on_mesh(self._load(ddp=False)) if config.algorithm.kl.coef > 0 else None
        )
        self._group: BroadcastGroup | None = None
        self.recorded_routes: Tensor | None = None
        self._deficits: Tensor | None = None  # of the rollout's routes, where last compared
        self._sent_routes: tuple[Tensor, Tensor] | None = None  # and their copy on the device

    def _parts(self) -> PartTensors:
        reference = self.reference
        if reference is None:
            return super()._parts()
        return {**super()._parts(), "reference": lambda: parameters_and_buffers(reference.chunks)}

    def _on_mesh(self, chunks: Sequence[torch.nn.Module]) -> ModelOnMesh:
        temperature = self.config.rollout.temperature  # 1 in supervised runs
        return ModelOnMesh(chunks, self.arch, self.mesh, self.config.policy, temperature)

    def native_losses(self) -> list[str]:
        """Losses and bias updates of the routers that are on, as ``name=coefficient``."""
        if not self.arch.moe_layers:  # Megatron's defaults then stay as they are, and do nothing
            return []
        config = self.chunks[0].config
        rate = config.moe_router_bias_update_rate
        biased = [f"moe_router_bias_update_rate={rate}"] if rate else []
        return [*native_losses(config), *biased]

    # One step's sequences

    def begin_step(self, shard: Batch) -> FetchedObjects | None:
        """Take this rank's sequences of the step; tokens and routes are checked here.

        Returns:
            What of their routes came from other nodes; None where no reference was to follow.
        """
        shard.check_tokens(self.arch.vocab_size)
        self.recorded_routes = self._sent_routes = None
        self._deficits = None
        routes = shard.rollout_expert_indices
        self._refs = routes if isinstance(routes, tuple) else ()
        came = None
        if isinstance(routes, tuple):
            check_refs(routes, shard.tokens.split(shard.seq_lens.tolist()), shard.weight_version)
            fetched = self._no_routes()
            if routes:
                fetched, came = fetch_and_count(routes, self.model.route_layers)
            shard = shard.with_fields(rollout_expert_indices=torch.from_numpy(fetched))
        elif routes is not None:
            columns = [self.arch.moe_layers.index(layer) for layer in self.model.route_layers]
            shard = shard.with_fields(rollout_expert_indices=routes[:, columns])
        self.shard = shard
        return came

    def _no_routes(self) -> RouteIds:
        """Of a shard without sequences, which a step that trains on few groups may leave."""
        shape = 0, len(self.model.route_layers), self.arch.experts_per_token
        return np.empty(shape, route_dtype(self.arch.num_experts))

    def score(
        self,
        plan: Plan,
        *,
        routing: Literal["native", "rollout", "recorded"],
        measure: bool = False,
        record: bool = False,
        of: Literal["policy", "reference"] = "policy",
    ) -> StageScored | None:
        """Log-probabilities of the shard.

        Args:
            routing: ``rollout`` replays the rollout engine's routes (R3), ``recorded`` those that
                an earlier call recorded
            measure: compare native routing with the rollout's
            record: keep the routes used, of all rows. `update` replays them everywhere (R2), or in
                rows without a captured route (R3 that falls back on R2).
        """
        shard = self._replaying(self._shard(), routing)
        # In mode r3 the native pass has another history than the engine had.
        compares = measure and (routing == "rollout" or self.config.routing_replay.mode != "r3")
        if compares and routing == "native":
            shard = self._compared(shard)
        model = self.model if of == "policy" else self.reference
        assert model is not None, "the reference was not built: algorithm.kl.coef is 0"
        traced = self.config.routing_replay.trace and routing == "rollout"
        ratio = self.config.routing_replay.min_gate_ratio if routing == "rollout" else 0.0
        scores = score(
            model,
            self._cut(plan, shard),
            shard.num_tokens,
            replay=routing != "native" or compares,
            record=record or measure or traced,
            compare=compares,
            min_gate_ratio=ratio,
        )
        if record and scores.recorded is not None:
            self.recorded_routes = scores.recorded.used
        if traced and scores.recorded is not None:
            self._trace(shard, plan, scores.recorded, f"scoring the {of}")
        if compares and scores.recorded is not None:
            self._deficits = scores.recorded.deficits
        if not self.mesh.is_output_rank:
            return None
        agreement = None
        if measure and scores.recorded is not None:
            layers = self.model.route_layers
            sizes = self.arch.num_layers, self.arch.num_experts
            agreement = agree(shard, scores.recorded, layers, *sizes)
        replayed = (0, 0)
        if ratio > 0 and scores.recorded is not None:
            replayed = kept_of_replayed(shard, scores.recorded)
        return StageScored(scores.logprobs, agreement, replayed)

    def locate(self, plan: Plan, *, routing: Literal["native", "rollout"]) -> Place | None:
        """See `rltrain.policy.passes.locate`. Collective."""
        shard = self._replaying(self._shard(), routing)
        cuts = self._cut(plan, shard)
        return locate(self.model, cuts, shard.num_tokens, replay=routing != "native")

    def wide_flips(self, narrow: Mapping[int, int]) -> WideFlips | None:
        """Of the shard's rows as last compared; see `rltrain.routing.flips.wide_flips`.

        Args:
            narrow: of every layer of the model that has a router
        """
        if not self.mesh.is_output_rank:
            return None
        assert self._deficits is not None, "no routes were compared in this step"
        shard = self._shard()
        routes, mask = shard.require("rollout_expert_indices", "route_mask")
        judged = judged_rows(mask, shard.seq_lens)
        layers = tuple(self.model.route_layers)
        return wide_flips(self._deficits, routes, judged, layers, narrow)

    def _compared(self, shard: Batch) -> Batch:
        """The shard, so that its routers choose natively and are compared with the rollout's."""
        (routes,) = shard.require("rollout_expert_indices")
        nowhere = torch.zeros(shard.num_tokens, dtype=torch.bool)
        return shard.with_fields(replay_expert_indices=self._on_device(routes), replay_mask=nowhere)

    def _replaying(self, shard: Batch, routing: str) -> Batch:
        """The shard with what its routers must choose; in native routing that is nothing.

        Rows that were not captured repeat what was recorded since, if anything was.
        """
        if routing == "native":
            return shard
        if routing == "recorded":
            assert self.recorded_routes is not None, "no routes were recorded in this step"
            everywhere = torch.ones(shard.num_tokens, dtype=torch.bool)
            routes = self._on_device(self.recorded_routes)
            return shard.with_fields(replay_expert_indices=routes, replay_mask=everywhere)
        routes, mask = shard.require("rollout_expert_indices", "route_mask")
        if self.recorded_routes is not None:
            routes = torch.where(mask.view(-1, 1, 1), routes, self.recorded_routes)
            mask = ~last_rows(shard.seq_lens)
        return shard.with_fields(replay_expert_indices=self._on_device(routes), replay_mask=mask)

    def _on_device(self, routes: Tensor) -> Tensor:
        """Once a step, as they are stored: a byte an expert, for all passes and micro-batches."""
        if self._sent_routes is None or self._sent_routes[0] is not routes:
            self._sent_routes = routes, to_device(routes, self.device)
        return self._sent_routes[1]

    def _trace(self, shard: Batch, plan: Plan, recorded: Recorded, when: str) -> None:
        """Prove that every router read the tokens and used the routes that the engine sent, in rows
        that have one."""
        (stored,) = shard.require("rollout_expert_indices")
        samples = sorted(i for micro_batch in plan for i in micro_batch)
        read, used, fetched = (
            [values.split(shard.seq_lens.tolist())[i] for i in samples]
            for values in (recorded.tokens, recorded.used, stored)
        )
        refs = [self._refs[i] for i in samples]
        repeated = None
        if self.recorded_routes is not None:
            recorded_of = self.recorded_routes.split(shard.seq_lens.tolist())
            repeated = [recorded_of[i] for i in samples]
        if layers := self.model.route_layers:
            check_trace(refs, read, used, fetched, layers, when, repeated)

    def update(
        self,
        plan: Plan,
        fields: dict[str, Tensor],
        *,
        routing: Literal["native", "rollout", "recorded"],
        kl_coef: float = 0.0,
    ) -> Updated | None:
        """One optimizer update on the planned sequences.

        Args:
            fields: of the whole shard, what has been computed since `begin_step`
            routing: whose experts to use; ``recorded`` are those `score` kept
            kl_coef: of the KL in the loss, which may adapt from step to step
        """
        shard = self._replaying(self._shard().with_fields(**fields), routing)
        traced = self.config.routing_replay.trace and routing == "rollout"
        recorder = Recorder(self.model, shard.num_tokens) if traced else None
        sums = self._accumulate(
            plan,
            shard,
            partial(self._objective, kl_coef),
            replay=routing != "native",
            recorder=recorder,
        )
        if recorder is not None:
            self._trace(shard, plan, recorder.gathered(), "the update")
        return self._take_step(sums)

    def _objective(
        self, kl_coef: float, mb: MicroBatch, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Sums]:
        batch = mb.batch
        (loss_weights,) = batch.require("loss_weights")
        if self.config.algorithm.type == "sft":
            return sft_objective(logprobs, weights=mb.at_targets(loss_weights))
        names = ["old_logprobs", "advantages", "ref_logprobs", "correction_weights"]
        token_fields = {n: getattr(batch, n) for n in names if getattr(batch, n) is not None}
        return policy_objective(
            logprobs,
            entropy,
            Targets(
                weights=mb.at_targets(loss_weights),
                **{name: mb.at_targets(values) for name, values in token_fields.items()},
            ),
            sequence_mean=sequence_mean(mb, loss_weights, self.mesh),
            config=self.config.algorithm,
            kl_coef=kl_coef,
        )

    # Weights

    def refresh_reference(self) -> None:
        """Make the reference a copy of the policy."""
        assert self.reference is not None, "the reference was not built: algorithm.kl.coef is 0"
        for mine, policy in zip(self.reference.chunks, self.chunks, strict=True):
            mine.load_state_dict(policy.module.state_dict())

    def device_name(self) -> str:
        """Its GPU, by a name that other processes give it too, or "cpu"."""
        return device_name(self.device)

    def join_receivers(self, link: SenderLink | None, senders: Sequence[int]) -> None:
        """Join the workers of engines that get this rank's bytes. Collective with them. The second
        time, after an engine was replaced, this leaves the earlier group.

        Args:
            link: None: this rank sends nothing
            senders: all ranks that send
        """
        self._gathering = Gathering(self.mesh.rank, senders)
        if self._group is not None:
            self._group.leave()
        self._link, self._group = link, None
        if link is not None and link.rendezvous is not None:
            limits = self.config.cluster
            self._group = BroadcastGroup(
                link.rendezvous,
                SENDER,
                self.device,
                limits.start_timeout_s,
                limits.call_timeout_s,
            )

    def begin_weight_stream(
        self, dtype: str, transport: Transport, receivers: Sequence[str]
    ) -> None:
        """Start handing the policy's weights out, cast to the engine's dtype. Collective.

        With the transport "broadcast" a rank streams the tensors of its pipeline stage, which are
        gathered on the stage's senders. With "ipc" every GPU with an engine needs all of them.

        Args:
            receivers: `device_name` of every engine worker
        """
        model = self.chunks, self.arch, self.mesh, getattr(torch, dtype)
        if transport == "ipc":
            tensors, stage, stages = full_tensors(*model), 0, 1
        else:
            tensors = stage_tensors(*model, self._gathering)
            stage, stages = self.mesh.pp_rank, self.mesh.pp_size
        if self.config.rollout.quantization == "fp8":
            tensors = quantize_stream(tensors, self.arch)
        sender = self._sender(transport, receivers)
        self._stream = BucketStream(tensors, sender, BUCKET_BYTES, stage=stage, stages=stages)

    def _sender(self, transport: Transport, receivers: Sequence[str]) -> BucketSender | None:
        if transport == "ipc":
            shares = self.device_name() in receivers
            return IpcSender(self.device, BUCKET_BYTES) if shares else None
        if self._link is None or not receivers:
            return None
        return BroadcastSender(self._group, self.device, BUCKET_BYTES, self._link.node)

    def next_weight_bucket(self) -> Bucket | None:
        """See `BucketStream.next_bucket`. Collective over the ranks of the stream."""
        return self._stream.next_bucket()

    def end_weight_stream(self) -> None:
        """Give back what it held, once the engines have loaded all of it."""
        self._stream.close()

    def export(self, path: str, dtype: str, *, fp8: bool = False) -> None:
        """Write the policy as a Hugging Face folder. Collective; rank 0 writes."""
        cast: torch.dtype = getattr(torch, dtype)
        tensors = full_tensors(self.chunks, self.arch, self.mesh, cast)
        write_huggingface(path, self.model_path, tensors, self.arch, cast, fp8=fp8)

    def export_for_engine(self, path: str) -> None:
        """As `export`, the weights as an engine is to hold them after a sync."""
        fp8 = self.config.rollout.quantization == "fp8"
        # What is quantised is what a sync casts to the engine's dtype.
        self.export(path, "bfloat16" if fp8 else "float32", fp8=fp8)

    def save_weights(self, folder: str) -> dict[str, ManifestEntry]:
        """As `save`, the policy's parameters without optimizer state. Collective."""
        return checkpoint.save_weights(folder, self.chunks, self.mesh)

    # The reference's checkpoint

    def save_reference(self, folder: str) -> dict[str, ManifestEntry]:
        """As `save`, the reference's parameters, which are those of the start until they are
        refreshed. Collective."""
        assert self.reference is not None, "the reference was not built: algorithm.kl.coef is 0"
        return checkpoint.save_weights(folder, self.reference.chunks, self.mesh)

    def begin_reference_save(self, folder: str) -> None:
        """As `save_reference`, in the background; see `begin_save`. Collective."""
        assert self.reference is not None, "the reference was not built: algorithm.kl.coef is 0"
        self.saves.append(checkpoint.begin_weights(folder, self.reference.chunks, self.mesh))

    def load_reference(self, folder: str) -> None:
        """Read what `save_reference` wrote. Collective."""
        assert self.reference is not None, "the reference was not built: algorithm.kl.coef is 0"
        trust = self.config.checkpoint.trust
        checkpoint.load_weights(folder, self.reference.chunks, self.mesh, trust=trust)
