"""How an engine with one worker meets a single sender, and gets its weights. Imports no vLLM."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import ray
from torch import Tensor

from rltrain.parallel.rendezvous import Rendezvous
from rltrain.weights.sync.broadcast import BroadcastSender
from rltrain.weights.sync.links import EngineLinks, GroupLink
from rltrain.weights.sync.stream import BucketStream

NODE = "10.0.0.1"


def links(meeting: Rendezvous) -> EngineLinks:
    """Of an engine with one worker, which joins a single sender, of stage 0. For other stages it
    reads the memory of its node."""
    group = GroupLink(stage=0, rendezvous=asdict(meeting), ranks=[1])
    return EngineLinks(
        node=NODE, shares=False, groups=[group], start_timeout_s=60.0, timeout_s=60.0
    )


def send_weights(
    engine: Any, sender: BroadcastSender, weights: Mapping[str, Tensor]
) -> BucketStream:
    """Have the actor of an engine load all of them, between start and finish of a weight sync."""
    stream = BucketStream(iter(weights.items()), sender, 100_000)
    while (bucket := stream.next_bucket()) is not None:
        sender.send()
        ray.get(engine.load_weight_bucket.remote(bucket))
    return stream
