"""Start the rollout engines a configuration asks for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from rltrain.config import Config
from rltrain.controller.cluster import Cluster
from rltrain.rollout.engine import start_engine
from rltrain.rollout.launch import EngineSpec, RouteCapture
from rltrain.rollout.route_store import RouteStore
from rltrain.routing.integrity import RouteShape
from rltrain.weights.architecture import Architecture


def engine_spec(config: Config, path: Path, arch: Architecture, placed: Cluster) -> EngineSpec:
    return EngineSpec(
        model_path=str(path),
        rollout=config.rollout,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.trainer.seed,
        device=placed.device,
        capture=_capture(config, arch),
        trust_remote_code=config.model.trust_remote_code,
    )


def start_engines(
    config: Config, spec: EngineSpec, placed: Cluster
) -> tuple[list[Any], Callable[[], list[dict[str, Any]]]]:
    """Begin loading every engine.

    Returns:
        The actors, and a function that waits until all are ready and returns their capabilities.
    """
    started = [start_engine(spec, placed.engine_gpus) for _ in range(config.rollout.num_engines)]
    limit = config.cluster.start_timeout_s
    return [engine for engine, _ in started], lambda: ray.get(
        [ready for _, ready in started], timeout=limit
    )


def _capture(config: Config, arch: Architecture) -> RouteCapture | None:
    if not config.routing_replay.capture or arch.num_experts == 0:
        return None
    shape = RouteShape(
        num_layers=arch.num_layers,
        moe_layers=arch.moe_layers,
        num_experts=arch.num_experts,
        experts_per_token=arch.experts_per_token,
    )
    # One block of layers per pipeline stage, so that no node receives layers its ranks do not own.
    stages = config.policy.parallel.pp
    return RouteCapture(shape, len(arch.moe_layers) // stages, RouteStore.remote())
