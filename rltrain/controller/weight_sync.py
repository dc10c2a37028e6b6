"""Bring the policy's weights into every engine, and prove that they arrived."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import ray

from rltrain.config.rollout import Transport
from rltrain.config.trainer import TrainerConfig
from rltrain.controller.cluster.colocation import Colocation
from rltrain.controller.cluster.engines import Engines, get_all_of_engines
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.cluster.rendezvous import rendezvous_file
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec
from rltrain.weights.sync.digest import check_same
from rltrain.weights.sync.stream import SLOTS, Bucket, merge_buckets


def is_sync_due(trainer: TrainerConfig, step: int, *, evaluates: bool) -> bool:
    """On every ``sync_every``-th step, and before the last evaluation: an evaluation measures the
    weights of its own step, and the configuration lets no other fall between two syncs.

    Args:
        evaluates: whether an evaluation follows this step
    """
    return (evaluates and step == trainer.steps) or step % trainer.sync_every == 0


@dataclass
class WeightSync:
    """Streams the policy's weights into the engines, whichever way they travel."""

    policy: PolicyGroup
    engines: Engines
    transport: Transport
    _receivers: list[str] | None = field(default=None, init=False)
    """Devices of the engines' workers, once they are known and connected."""

    def sync(self, dtype: str) -> None:
        """One sync: while the engines load a bucket, the policy fills the next one, which waits in
        the engines' queues before they ask for it.

        Every bucket carries its checksum; an engine that misses one, or is sent too few, fails
        here. No engine may be generating.
        """
        if self._receivers is None:
            self._receivers = self._connect()
        self._load(self._begin(dtype, self._receivers))
        self._finish()

    def _begin(self, dtype: str, receivers: list[str]) -> Bucket | None:
        """Returns the first bucket."""
        wait_until_started = self.engines.start_weight_sync()
        self.policy.begin_weight_stream(dtype, self.transport, receivers)
        bucket = self._next_bucket()
        wait_until_started()
        return bucket

    def _load(self, bucket: Bucket | None) -> None:
        """Have the engines load a bucket and all that follow."""
        loading: list[Callable[[], Any]] = []
        while bucket is not None:
            loading.append(self.engines.load_weight_bucket(bucket))
            if len(loading) == SLOTS:  # the next bucket goes where the first of these is
                loading.pop(0)()
            bucket = self._next_bucket()
        for wait_until_loaded in loading:
            wait_until_loaded()

    def _finish(self) -> None:
        self.engines.finish_weight_sync()
        self.policy.end_weight_stream()

    def _next_bucket(self) -> Bucket | None:
        filled = self.policy.next_weight_buckets()
        if self.transport == "ipc":
            return merge_buckets(filled) if filled else None
        return filled[0] if filled else None

    def _connect(self) -> list[str]:
        """Raises ``ValueError``: an engine worker's GPU has no policy rank, for transport "ipc"."""
        devices = self.engines.devices()
        receivers = [device for engine in devices for device in engine]
        if self.transport == "ipc":
            check_shared(receivers, self.policy.device_names())
        if self.transport == "broadcast":
            file = str(rendezvous_file(self))
            size = 1 + len(receivers)
            first_ranks = list(accumulate(map(len, devices), initial=1))
            wait_until_joined = self.engines.join_group(file, first_ranks, size)
            self.policy.join_group(file, size)
            wait_until_joined()
        return receivers


def check_shared(receivers: Sequence[str], senders: Sequence[str]) -> None:
    if alone := sorted(set(receivers) - set(senders)):
        raise ValueError(
            f"rollout.weight_transfer=ipc: expected a policy rank on the GPU of every engine "
            f"worker, found none on {alone}: use rollout.weight_transfer=broadcast"
            " [RL4010]"
        )


def check_weight_sync(colocation: Colocation, spec: EngineSpec, options: dict[str, Any]) -> None:
    """Compare every engine, bitwise, with a fresh one started from an export of the policy.

    Slow: it starts an engine. On GPUs the engines sleep meanwhile.

    Args:
        options: of the fresh engine's actor

    Raises:
        ValueError: naming the tensors that differ.
    """
    with tempfile.TemporaryDirectory(prefix="rltrain-sync-check-") as folder:
        path = str(Path(folder) / "model")
        with colocation.engines_aside() if spec.sleeps else nullcontext():
            with colocation.parameters_back():
                colocation.policy.export_for_engine(path)
            actor, ready = start_engine(replace(spec, model_path=path, capture=None), **options)
            engine = replace(colocation.engines, actors=[actor])
            try:
                get_all_of_engines([ready], "start", engine.timeout_s)
                [fresh] = engine.digests()
                engine.shutdown()
            finally:
                ray.kill(actor)
        for synced in colocation.engines.digests():
            check_same(synced, fresh)
