"""Bring the policy's weights into every engine, and prove that they arrived."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rltrain.controller.engines import answers, ask
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
    ask(engines, "start_weight_sync", timeout_s)
    while (bucket := policy.call("next_weight_bucket")[0]) is not None:
        ask(engines, "load_weight_bucket", timeout_s, bucket)
    ask(engines, "finish_weight_sync", timeout_s)


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
        policy.call("export_for_engine", path)
        engine, ready = start_engine(replace(spec, model_path=path, capture=None))
        try:
            answers([ready], "start", timeout_s)
            [fresh] = ask([engine], "digest", timeout_s)
        finally:
            ray.kill(engine)
    for synced in ask(engines, "digest", timeout_s):
        check_same(synced, fresh)
