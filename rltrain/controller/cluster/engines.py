"""Start the rollout engines a configuration asks for."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import ray

from rltrain.actors import failures
from rltrain.actors.actor_log import LOG, end_logged
from rltrain.actors.failures import AwaitedCall
from rltrain.config import Config
from rltrain.controller.cluster.disks import disks_of
from rltrain.controller.cluster.method_call import method_call
from rltrain.controller.cluster.ray_cluster import Cluster
from rltrain.controller.cluster.route_stores import (
    object_bytes,
    start_route_stores,
    warn_of_small_stores,
)
from rltrain.parallel.layer_map import Pipeline, route_blocks
from rltrain.rollout.engine import RolloutEngine, start_engine
from rltrain.rollout.launch import EngineSpec, RouteCapture
from rltrain.routing.integrity import RouteShape
from rltrain.weights.architecture.decoder import Architecture
from rltrain.weights.sync.engine_fp8 import fp8_config
from rltrain.weights.sync.links import EngineLinks
from rltrain.weights.sync.stream import Bucket

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engines:
    """All rollout engines as one. Results are in the order of ``actors``.

    Raises:
        ActorFailed: from every method: an engine raised, died, or did not answer in ``timeout_s``.
    """

    actors: list[Any]
    """One that is started again takes the place of the dead one, for all who hold this list."""
    start_timeout_s: float
    timeout_s: float

    def sleep(self, level: Literal[1, 2]) -> None:
        """See `RolloutEngine.sleep`."""
        self._begin(lambda engine, _: engine.sleep(level))()

    def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """See `RolloutEngine.wake`."""
        self._begin(lambda engine, _: engine.wake(parts))()

    def devices(self) -> list[list[str]]:
        """By engine; see `RolloutEngine.devices`."""
        return self._begin(lambda engine, _: engine.devices())()

    def digests(self) -> list[dict[str, str]]:
        """By engine; see `RolloutEngine.digest`."""
        return self._begin(lambda engine, _: engine.digest())()

    def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        self._begin(lambda engine, _: engine.shutdown())()

    # A weight sync; what begins here goes on while the policy works, until the result is called

    def join_senders(self, links: Sequence[EngineLinks]) -> list[Any]:
        """See `RolloutEngine.join_senders`; ``links`` is by engine. Returns references to the
        answers, by engine."""
        return self._send(lambda engine, n: engine.join_senders(links[n]))[1]

    def start_weight_sync(self) -> Callable[[], Any]:
        """See `RolloutEngine.start_weight_sync`."""
        return self._begin(lambda engine, _: engine.start_weight_sync())

    def load_weight_bucket(self, bucket: Bucket) -> Callable[[], Any]:
        """See `RolloutEngine.load_weight_bucket`."""
        return self._begin(lambda engine, _: engine.load_weight_bucket(bucket))

    def finish_weight_sync(self, version: int) -> None:
        """See `RolloutEngine.finish_weight_sync`."""
        self._begin(lambda engine, _: engine.finish_weight_sync(version))()

    def _begin(self, write: Callable[[RolloutEngine, int], Any]) -> Callable[[], list[Any]]:
        """Call one method on every engine at once.

        Args:
            write: see `method_call`; the engine's number comes second

        Returns:
            A function that waits for the answers.
        """
        method, refs = self._send(write)
        return lambda: get_all_of_engines(refs, method, self.timeout_s)

    def _send(self, write: Callable[[RolloutEngine, int], Any]) -> tuple[str, list[Any]]:
        """As `_begin`; returns the method and references to the answers."""
        calls = [method_call(write, number) for number in range(len(self.actors))]
        refs = [
            getattr(actor, call.method).remote(*call.args, **call.kwargs)
            for actor, call in zip(self.actors, calls, strict=True)
        ]
        return calls[0].method, refs


def engine_spec(config: Config, path: Path, arch: Architecture, placed: Cluster) -> EngineSpec:
    return EngineSpec(
        model_path=str(path),
        rollout=config.rollout,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.trainer.seed,
        device=placed.device,
        interface=config.cluster.interface,
        capture=_capture(config, arch, placed),
        trust_remote_code=config.model.trust_remote_code,
        quantization=fp8_config(arch) if config.rollout.quantization == "fp8" else None,
        # For training to have the GPUs, or a fresh engine to compare with.
        sleeps=placed.device == "cuda"
        and (placed.placement.colocated or config.trainer.check_weight_sync),
    )


def start_engines(
    config: Config, spec: EngineSpec, placed: Cluster
) -> tuple[Engines, Callable[[], list[dict[str, Any]]]]:
    """Begin loading every engine.

    Returns:
        The engines, and a function that waits until all are ready and returns their capabilities.
    """
    began = time.monotonic()
    started = [start_one(spec, placed, n) for n in range(config.rollout.num_engines)]

    @cache
    def wait_until_ready() -> list[dict[str, Any]]:
        limit = config.cluster.start_timeout_s
        capabilities = get_all_of_engines([ready for _, ready in started], "start", limit)
        taken = time.monotonic() - began
        logger.info("rollout engines are ready: %d, after %.0f s", len(started), taken)
        return capabilities

    limits = config.cluster.start_timeout_s, config.cluster.call_timeout_s
    return Engines([actor for actor, _ in started], *limits), wait_until_ready


def start_one(spec: EngineSpec, placed: Cluster, engine: int) -> tuple[Any, Any]:
    """Begin to load engine number ``engine``, in its place; see `start_engine`."""
    options = placed.engine_options(engine)
    return start_engine(replace(spec, seed=spec.seed + engine), **options)


def start_again(
    config: Config, spec: EngineSpec, placed: Cluster, engine: int, actor: Any
) -> tuple[Any, Any]:
    """End what is left of an engine, and begin to load it anew, as `start_one`. Its log goes on.

    Args:
        actor: of the one that died or is silent
    """
    ray.kill(actor)
    # vLLM's processes may outlive their actor, and keep its GPUs.
    log = placed.engine_options(engine)["runtime_env"]["env_vars"][LOG]
    disks_of(config, placed).call_each(end_logged, {placed.engine_nodes[engine]: (log,)})
    return start_one(spec, placed, engine)


def get_all_of_engines(refs: list[Any], method: str, timeout_s: float) -> list[Any]:
    """What the engines answered, in the order of ``refs``.

    Raises:
        ActorFailed: an engine raised, died, or is silent for longer than ``timeout_s``.
    """
    key = f"cluster.{'start' if method == 'start' else 'call'}_timeout_s"
    return failures.get_all(refs, AwaitedCall("rollout", method, key), timeout_s)


def _capture(config: Config, arch: Architecture, placed: Cluster) -> RouteCapture | None:
    if not config.routing_replay.capture or arch.num_experts == 0:
        return None
    shape = RouteShape(
        num_layers=arch.num_layers,
        moe_layers=arch.moe_layers,
        num_experts=arch.num_experts,
        experts_per_token=arch.experts_per_token,
    )
    warn_of_small_stores(config, arch, placed.engine_nodes)
    # An object per pipeline chunk, so that no node receives layers its ranks do not own.
    pipeline = Pipeline.of(config.policy.parallel)
    return RouteCapture(
        shape,
        start_route_stores(placed),
        block_sizes=route_blocks(pipeline, arch.num_layers, arch.moe_layers),
        fallback=config.routing_replay.fallback,
        object_bytes=object_bytes(placed.policy_nodes, config.policy.parallel.pp),
    )
