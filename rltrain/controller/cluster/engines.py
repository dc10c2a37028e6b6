"""Start the rollout engines a configuration asks for."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rltrain.actors import failures
from rltrain.actors.failures import AwaitedCall
from rltrain.config import Config
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.parallel.layer_map import Pipeline, route_blocks
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec, RouteCapture
from rltrain.rollout.route_store import RouteStore
from rltrain.routing.integrity import RouteShape
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.sync.engine_fp8 import fp8_config

logger = logging.getLogger(__name__)


def engine_spec(config: Config, path: Path, arch: Architecture, placed: Cluster) -> EngineSpec:
    return EngineSpec(
        model_path=str(path),
        rollout=config.rollout,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.trainer.seed,
        device=placed.device,
        capture=_capture(config, arch),
        trust_remote_code=config.model.trust_remote_code,
        quantization=fp8_config(arch) if config.rollout.quantization == "fp8" else None,
        # For training to have the GPUs, or a fresh engine to compare with.
        sleeps=placed.device == "cuda"
        and (placed.placement.colocated or config.trainer.check_weight_sync),
    )


def start_engines(
    config: Config, spec: EngineSpec, placed: Cluster
) -> tuple[list[Any], Callable[[], list[dict[str, Any]]]]:
    """Begin loading every engine.

    Returns:
        The actors, and a function that waits until all are ready and returns their capabilities.
    """
    began = time.monotonic()
    started = [
        start_engine(replace(spec, seed=spec.seed + n), **placed.engine_options(n))
        for n in range(config.rollout.num_engines)
    ]

    @cache
    def wait_until_ready() -> list[dict[str, Any]]:
        limit = config.cluster.start_timeout_s
        capabilities = get_all([ready for _, ready in started], "start", limit)
        taken = time.monotonic() - began
        logger.info("rollout engines are ready: %d, after %.0f s", len(started), taken)
        return capabilities

    return [engine for engine, _ in started], wait_until_ready


def call_all(engines: Sequence[Any], method: str, timeout_s: float, *args: Any) -> list[Any]:
    """AwaitedCall ``method`` on every engine at once; see `answers`."""
    return get_all([getattr(engine, method).remote(*args) for engine in engines], method, timeout_s)


def get_all(refs: list[Any], what: str, timeout_s: float) -> list[Any]:
    """What the engines answered, in the order of ``refs``.

    Raises:
        ActorFailed: an engine raised, died, or is silent for longer than ``timeout_s``.
    """
    key = f"cluster.{'start' if what == 'start' else 'call'}_timeout_s"
    return failures.get_all(refs, AwaitedCall("rollout", what, key), timeout_s)


def _capture(config: Config, arch: Architecture) -> RouteCapture | None:
    if not config.routing_replay.capture or arch.num_experts == 0:
        return None
    shape = RouteShape(
        num_layers=arch.num_layers,
        moe_layers=arch.moe_layers,
        num_experts=arch.num_experts,
        experts_per_token=arch.experts_per_token,
    )
    # An object per pipeline chunk, so that no node receives layers its ranks do not own.
    pipeline = Pipeline.of(config.policy.parallel)
    return RouteCapture(
        shape,
        RouteStore.remote(),
        block_sizes=route_blocks(pipeline, arch.num_layers, arch.moe_layers),
        fallback=config.routing_replay.fallback,
    )
