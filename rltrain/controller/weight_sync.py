"""Bring the policy's weights into every engine, and prove that they arrived."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import ray

from rltrain.config.rollout import Transport
from rltrain.controller.cluster.colocation import Colocation
from rltrain.controller.cluster.engines import call_all, get_all
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec
from rltrain.weights.sync.digest import check_same
from rltrain.weights.sync.stream import SLOTS, Bucket, merged


@dataclass
class WeightSync:
    """Streams the policy's weights into the engines, whichever way they travel."""

    policy: PolicyGroup
    engines: Sequence[Any]
    transport: Transport
    timeout_s: float
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
        starting = [engine.start_weight_sync.remote() for engine in self.engines]
        self.policy.call("begin_weight_stream", dtype, self.transport, receivers)
        bucket = self._next_bucket()
        get_all(starting, "start_weight_sync", self.timeout_s)
        return bucket

    def _load(self, bucket: Bucket | None) -> None:
        """Have the engines load a bucket and all that follow."""
        loading: list[list[Any]] = []
        while bucket is not None:
            loading.append([engine.load_weight_bucket.remote(bucket) for engine in self.engines])
            if len(loading) == SLOTS:  # the next bucket goes where the first of these is
                get_all(loading.pop(0), "load_weight_bucket", self.timeout_s)
            bucket = self._next_bucket()
        for busy in loading:
            get_all(busy, "load_weight_bucket", self.timeout_s)

    def _finish(self) -> None:
        call_all(self.engines, "finish_weight_sync", self.timeout_s)
        self.policy.call("end_weight_stream")

    def _next_bucket(self) -> Bucket | None:
        filled = [b for b in self.policy.call("next_weight_bucket") if b is not None]
        if self.transport == "ipc":
            return merged(filled) if filled else None
        return filled[0] if filled else None

    def _connect(self) -> list[str]:
        """Raises ``ValueError``: an engine worker's GPU has no policy rank, for transport "ipc"."""
        devices: list[list[str]] = call_all(self.engines, "devices", self.timeout_s)
        receivers = [device for engine in devices for device in engine]
        if self.transport == "ipc":
            check_shared(receivers, self.policy.call("device_name"))
        if self.transport == "broadcast":
            file = str(Path(tempfile.mkdtemp(prefix="rltrain-broadcast-")) / "group")
            size = 1 + len(receivers)
            ranks = accumulate(map(len, devices), initial=1)
            joining = [
                engine.join_group.remote(file, rank, size, self.timeout_s)
                for engine, rank in zip(self.engines, ranks, strict=False)
            ]
            self.policy.call("join_group", file, size)
            get_all(joining, "join_group", self.timeout_s)
        return receivers


def check_shared(receivers: Sequence[str], senders: Sequence[str]) -> None:
    if alone := sorted(set(receivers) - set(senders)):
        raise ValueError(
            f"rollout.weight_transfer=ipc: expected a policy rank on the GPU of every engine "
            f"worker, found none on {alone}: use rollout.weight_transfer=broadcast"
        )


def check_weight_sync(
    colocation: Colocation, spec: EngineSpec, options: dict[str, Any], timeout_s: float
) -> None:
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
                colocation.policy.call("export_for_engine", path)
            engine, ready = start_engine(replace(spec, model_path=path, capture=None), **options)
            try:
                get_all([ready], "start", timeout_s)
                [fresh] = call_all([engine], "digest", timeout_s)
                call_all([engine], "shutdown", timeout_s)
            finally:
                ray.kill(engine)
        for synced in call_all(colocation.engines, "digest", timeout_s):
            check_same(synced, fresh)
