"""In which order the buckets of pipeline stages are filled and loaded."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.controller.cluster.engines import Engines
from rltrain.controller.cluster.policy_group import PolicyGroup
from rltrain.controller.weight_links import Connection, SyncNodes
from rltrain.controller.weight_sync import WeightSync
from rltrain.weights.sync.stream import Bucket, BucketStream
from tests.unit.weights.held import HeldSender

BUCKET_BYTES = 64


def tensors(stage: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Of a stage, of so many numbers each."""
    return {f"{stage}.{i}": torch.full((size,), i) for i, size in enumerate(sizes)}


class EagerStages:
    """The policy's side: a bucket is filled when it is asked for, as early as it can be."""

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self.senders = [HeldSender(BUCKET_BYTES) for _ in sizes]
        self.filled: list[tuple[int, int]] = []
        self._streams = [
            BucketStream(
                iter(tensors(stage, of).items()),
                sender,
                BUCKET_BYTES,
                stage=stage,
                stages=len(sizes),
            )
            for stage, (of, sender) in enumerate(zip(sizes, self.senders, strict=True))
        ]

    def next_weight_buckets(self, ranks: Sequence[int]) -> Callable[[], list[Bucket]]:
        bucket = self._streams[ranks[0]].next_bucket()
        if bucket is not None:
            self.filled.append((bucket["stage"], bucket["index"]))
        return lambda: [] if bucket is None else [bucket]


class LateEngines:
    """The engines' side: a bucket is read when somebody waits for it, as late as it can be."""

    def __init__(self, senders: Sequence[HeldSender]) -> None:
        self.loaded: list[tuple[int, int]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._senders = senders

    def load_weight_bucket(self, bucket: Bucket) -> Callable[[], Any]:
        def load() -> None:
            self.tensors |= dict(self._senders[bucket["stage"]].read(bucket))
            self.loaded.append((bucket["stage"], bucket["index"]))

        return load


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=12), min_size=1, max_size=4))
def test_no_bucket_is_filled_again_before_it_is_loaded(sizes: list[list[int]]) -> None:
    stages = EagerStages(sizes)
    engines = LateEngines(stages.senders)
    nodes = SyncNodes([], [])
    sync = WeightSync(cast(PolicyGroup, stages), cast(Engines, engines), "broadcast", nodes)
    streams = [[stage] for stage in range(len(sizes))]
    first = [stages.next_weight_buckets(ranks) for ranks in streams]
    sent = sync._load(first, Connection([], streams, [0] * len(streams)))
    whole = {n: x for stage, of in enumerate(sizes) for n, x in tensors(stage, of).items()}
    assert engines.tensors.keys() == whole.keys()
    assert all(torch.equal(engines.tensors[name], tensor) for name, tensor in whole.items())
    # One stage after the other, each of which has filled its first bucket at the start.
    assert engines.loaded == sorted(engines.loaded) == sorted(stages.filled)
    assert stages.filled[: len(sizes)] == [(stage, 0) for stage in range(len(sizes))]
    assert all(nbytes >= 8 * sum(of) for nbytes, of in zip(sent, sizes, strict=True))
