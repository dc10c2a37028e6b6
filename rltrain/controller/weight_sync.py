"""Bring the policy's weights into every engine, and prove that they arrived."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rltrain.controller.engines import answers, ask
from rltrain.controller.policy_group import PolicyGroup
from rltrain.controller.turns import Turns
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
