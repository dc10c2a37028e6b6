"""Bring the policy's weights into every engine."""

from collections.abc import Sequence
from typing import Any

import ray

from rltrain.controller.policy_group import PolicyGroup


def sync_weights(policy: PolicyGroup, engines: Sequence[Any], dtype: str, timeout_s: float) -> None:
    """Stream the policy's weights through shared memory, a bucket at a time.

    The policy writes a bucket, all engines read it, and only then is the next one written. Every
    tensor carries its checksum; an engine that misses one, or is sent too few, fails here.
    """
    policy.call("begin_weight_stream", dtype)
    _all(engines, "start_weight_sync", timeout_s)
    while (bucket := policy.call("next_weight_bucket")[0]) is not None:
        _all(engines, "load_weight_bucket", timeout_s, bucket)
    _all(engines, "finish_weight_sync", timeout_s)


def _all(engines: Sequence[Any], method: str, timeout_s: float, *args: Any) -> None:
    ray.get([getattr(engine, method).remote(*args) for engine in engines], timeout=timeout_s)
