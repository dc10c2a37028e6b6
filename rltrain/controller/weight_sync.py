"""Bring the policy's weights into every engine, and prove that they arrived."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rltrain.controller.policy_group import PolicyGroup
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec
from rltrain.weights.digest import check_same


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


def check_weight_sync(
    policy: PolicyGroup, engines: Sequence[Any], spec: EngineSpec, timeout_s: float
) -> None:
    """Compare every engine, bitwise, with a fresh one started from an export of the policy.

    Slow: it starts an engine. On a GPU that needs as much free memory again.

    Raises:
        ValueError: naming the tensors that differ.
    """
    with tempfile.TemporaryDirectory(prefix="rltrain-sync-check-") as folder:
        path = str(Path(folder) / "model")
        policy.call("export", path, "float32")
        engine, ready = start_engine(replace(spec, model_path=path, capture=None))
        try:
            ray.get(ready, timeout=timeout_s)
            fresh = ray.get(engine.digest.remote(), timeout=timeout_s)
        finally:
            ray.kill(engine)
    for synced in _all(engines, "digest", timeout_s):
        check_same(synced, fresh)


def _all(engines: Sequence[Any], method: str, timeout_s: float, *args: Any) -> list[Any]:
    answers: list[Any] = ray.get(
        [getattr(engine, method).remote(*args) for engine in engines], timeout=timeout_s
    )
    return answers
