"""Bring the policy's weights into every engine, and prove that they arrived."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import ray

from rltrain.config.rollout import Carrier
from rltrain.controller.cluster.colocation import Turns
from rltrain.controller.cluster.engines import answers, ask
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
    carrier: Carrier
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
        self.policy.call("begin_weight_stream", dtype, self.carrier, receivers)
        bucket = self._next_bucket()
        answers(starting, "start_weight_sync", self.timeout_s)
        return bucket

    def _load(self, bucket: Bucket | None) -> None:
        """Have the engines load a bucket and all that follow."""
        loading: list[list[Any]] = []
        while bucket is not None:
            loading.append([engine.load_weight_bucket.remote(bucket) for engine in self.engines])
            if len(loading) == SLOTS:  # the next bucket goes where the first of these is
                answers(loading.pop(0), "load_weight_bucket", self.timeout_s)
            bucket = self._next_bucket()
        for busy in loading:
            answers(busy, "load_weight_bucket", self.timeout_s)

    def _finish(self) -> None:
        ask(self.engines, "finish_weight_sync", self.timeout_s)
        self.policy.call("end_weight_stream")

    def _next_bucket(self) -> Bucket | None:
        filled = [b for b in self.policy.call("next_weight_bucket") if b is not None]
        if self.carrier == "ipc":
            return merged(filled) if filled else None
        return filled[0] if filled else None

    def _connect(self) -> list[str]:
        """Raises ``ValueError``: an engine worker's GPU has no policy rank, for carrier "ipc"."""
        devices: list[list[str]] = ask(self.engines, "devices", self.timeout_s)
        receivers = [device for engine in devices for device in engine]
        if self.carrier == "ipc":
            check_shared(receivers, self.policy.call("device_name"))
        if self.carrier == "broadcast":
            file = str(Path(tempfile.mkdtemp(prefix="rltrain-broadcast-")) / "group")
            size = 1 + len(receivers)
            ranks = accumulate(map(len, devices), initial=1)
            joining = [
                engine.join_group.remote(file, rank, size, self.timeout_s)
                for engine, rank in zip(self.engines, ranks, strict=False)
            ]
            self.policy.call("join_group", file, size)
            answers(joining, "join_group", self.timeout_s)
        return receivers


def check_shared(receivers: Sequence[str], senders: Sequence[str]) -> None:
    if alone := sorted(set(receivers) - set(senders)):
        raise ValueError(
            f"rollout.weight_transfer=ipc: expected a policy rank on the GPU of every engine "
            f"worker, found none on {alone}: use rollout.weight_transfer=broadcast"
        )


def check_weight_sync(
    turns: Turns, spec: EngineSpec, options: dict[str, Any], timeout_s: float
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
        with turns.engines_aside() if spec.sleeps else nullcontext():
            with turns.parameters_back():
                turns.policy.call("export_for_engine", path)
            engine, ready = start_engine(replace(spec, model_path=path, capture=None), **options)
            try:
                answers([ready], "start", timeout_s)
                [fresh] = ask([engine], "digest", timeout_s)
                ask([engine], "shutdown", timeout_s)
            finally:
                ray.kill(engine)
        for synced in ask(turns.engines, "digest", timeout_s):
            check_same(synced, fresh)
