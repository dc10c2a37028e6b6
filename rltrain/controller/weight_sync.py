"""Bring the policy's weights into every engine, and prove that they arrived."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import mul
from pathlib import Path
from typing import Any

import ray

from rltrain.actors import node_files
from rltrain.actors.failures import sparing
from rltrain.config.rollout import Transport
from rltrain.config.trainer import TrainerConfig
from rltrain.controller.checkpoint_space import check_free
from rltrain.controller.cluster.colocation import Colocation
from rltrain.controller.cluster.disks import Disks
from rltrain.controller.cluster.engines import Engines, get_all_of_engines
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.weight_links import Connection, SyncNodes, connect
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec
from rltrain.weights.sync.digest import check_same
from rltrain.weights.sync.stream import SLOTS, Bucket, merge_buckets

Filling = Callable[[], list[Bucket]]
"""Waits for the next bucket of a stream: one from each rank that sends it, none after the last."""


def is_sync_due(trainer: TrainerConfig, step: int, *, evaluates: bool) -> bool:
    """On every ``sync_every``-th step, and before the last evaluation: an evaluation measures the
    weights of its own step, and the configuration lets no other fall between two syncs.

    Args:
        evaluates: whether an evaluation follows this step
    """
    return (evaluates and step == trainer.steps) or step % trainer.sync_every == 0


@dataclass
class WeightSync:
    """Streams the policy's weights into the engines, whichever way they travel.

    With the transport "broadcast" each pipeline stage has a stream, with "ipc" the model has one.
    """

    policy: PolicyGroup
    engines: Engines
    transport: Transport
    nodes: SyncNodes
    watch: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, init=False)
    """Weights are sent inside it."""
    _connection: Connection | None = field(default=None, init=False)
    """Once the engines' workers are known and connected."""
    _version: int = field(default=0, init=False)
    _dtype: str | None = field(default=None, init=False)
    """Of the last sync, while the policy has the weights that it sent then."""

    def sync(self, dtype: str) -> dict[str, float]:
        """Send the policy's weights. No engine may be generating.

        Every bucket carries its checksum; an engine that misses one, or is sent too few, fails
        here. The others are then half-loaded, so all of them would have to be started again.

        Returns:
            Metrics ``weights/*``.
        """
        self._version += 1
        metrics = self._stream(dtype)
        self._dtype = dtype
        return metrics

    @property
    def version(self) -> int:
        """Of the weights that were sent last."""
        return self._version

    def outdate(self) -> None:
        """The policy's weights change."""
        self._dtype = None

    @property
    def can_repeat(self) -> bool:
        """Whether the policy still has the weights that it sent last."""
        return self._dtype is not None

    def repeat(self) -> None:
        """Send the same weights once more, since an engine was replaced. None may be generating."""
        assert self._dtype is not None
        self._stream(self._dtype)

    def disconnect(self) -> None:
        """An engine was replaced: all connect anew at the next sync."""
        self._connection = None

    def _stream(self, dtype: str) -> dict[str, float]:
        """While the engines load a bucket, the policy fills the next one, which waits in the
        engines' queues before they ask for it. Policy and engines wait for one another, so any
        death ends it."""
        with self.watch(), sparing():
            if self._connection is None:
                self._connection = connect(self.policy, self.engines, self.transport, self.nodes)
            first = self._begin(dtype, self._connection)
            sent = self._load(first, self._connection)
            self._finish()
        crossed = map(mul, sent, self._connection.crossings)
        return {
            "weights/bytes": float(sum(sent)),
            "weights/bytes_between_nodes": float(sum(crossed)),
        }

    def _begin(self, dtype: str, connection: Connection) -> list[Filling]:
        """Returns a function for each stream that waits for the first bucket."""
        wait_until_started = self.engines.start_weight_sync()
        self.policy.begin_weight_stream(dtype, self.transport, connection.receivers)
        first = [self.policy.next_weight_buckets(ranks) for ranks in connection.streams]
        wait_until_started()
        return first

    def _load(self, first: Sequence[Filling], connection: Connection) -> list[int]:
        """Have the engines load all buckets of one stream, then of the next, whose first bucket was
        filled at the beginning.

        Streams do not alternate: an engine keeps what it has of a layer until the layer is
        complete, and would keep a part of a layer of every stage.

        Returns:
            The bytes of each stream.
        """
        sent, loading = [0] * len(first), list[Callable[[], Any]]()
        for stage, (ranks, filling) in enumerate(zip(connection.streams, first, strict=True)):
            while (bucket := self._filled(filling)) is not None:
                loading.append(self.engines.load_weight_bucket(connection.with_memory(bucket)))
                sent[stage] += bucket["payload"]["nbytes"]
                if len(loading) == SLOTS:  # the next bucket goes where the first of these is
                    loading.pop(0)()
                filling = self.policy.next_weight_buckets(ranks)
        for wait_until_loaded in loading:
            wait_until_loaded()
        return sent

    def _finish(self) -> None:
        self.engines.finish_weight_sync(self._version)
        self.policy.end_weight_stream()

    def _filled(self, filling: Filling) -> Bucket | None:
        """The bucket of a stream, from all that send it; None after the last."""
        filled = filling()
        return merge_buckets(filled) if filled else None


def check_weight_sync(
    colocation: Colocation,
    spec: EngineSpec,
    options: dict[str, Any],
    disks: Disks,
    node: str,
    nbytes: int,
) -> None:
    """Compare every engine, bitwise, with a fresh one started from an export of the policy.

    Slow: it starts an engine. On GPUs the engines sleep meanwhile.

    Args:
        options: of the fresh engine's actor, which is on ``node``
        nbytes: of the export, at least

    Raises:
        ValueError: naming the tensors that differ.
        RuntimeError: there is no room for the export.
    """
    with tempfile.TemporaryDirectory(prefix="rltrain-sync-check-") as folder:
        path = Path(folder) / "model"
        writer = colocation.policy.nodes[0]
        check_free(disks, Path(folder).parent, dict.fromkeys((writer, node), nbytes), "an export")
        try:
            with colocation.engines_aside() if spec.sleeps else nullcontext():
                with colocation.parameters_back():
                    colocation.policy.export_for_engine(str(path))
                disks.copy_folder(path, writer, [node])
                fresh = _digest_of_fresh_engine(colocation, spec, options, path)
        finally:
            disks.call_each(node_files.remove, {at: (Path(folder),) for at in (writer, node)})
        for synced in colocation.engines.digests():
            check_same(synced, fresh)


def _digest_of_fresh_engine(
    colocation: Colocation, spec: EngineSpec, options: dict[str, Any], path: Path
) -> Any:
    actor, ready = start_engine(replace(spec, model_path=str(path), capture=None), **options)
    engine = replace(colocation.engines, actors=[actor])
    try:
        get_all_of_engines([ready], "start", engine.timeout_s)
        [fresh] = engine.digests()
        engine.shutdown()
    finally:
        ray.kill(actor)
    return fresh
