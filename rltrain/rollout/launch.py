"""The arguments that an engine is started with. Pure; imports no vLLM."""

import difflib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from ray.actor import ActorHandle

from rltrain.config.rollout import OLDEST_VLLM, RolloutConfig
from rltrain.config.routing import Fallback
from rltrain.routing.integrity import RouteShape
from rltrain.routing.objects import OBJECT_BYTES
from rltrain.weights.sync.engine_fp8 import LOAD_FORMAT

ROUTE_SCHEDULER = "rltrain.rollout.route_scheduler.route_scheduler"
UPDATED_SCHEDULER = "rltrain.rollout.route_scheduler.updated_in_flight"
ROUTE_SCHEDULER_VERSIONS = ">=0.26,<0.31"


@dataclass(frozen=True)
class RouteCapture:
    """Shape of the engine's routes, where they are stored, and what happens to malformed rows."""

    shape: RouteShape
    stores: Mapping[str, ActorHandle]
    """The `RouteStore` of each node with an engine, by the node's address. Who starts engines keeps
    the handles, or the stores die with the engines."""
    block_sizes: tuple[int, ...] | None = None  # layers per object, in order; None: all in one
    fallback: Fallback = "error"
    object_bytes: int = OBJECT_BYTES
    """Samples share an object up to this size; 0: each has its own."""

    def __post_init__(self) -> None:
        layers = len(self.shape.moe_layers)
        if layers == 0:
            raise ValueError(
                "the model has no layer with a router, so there are no routes to capture: set "
                "routing_replay.mode=off and routing_replay.capture=false, or choose a MoE model"
                " [RL3007]"
            )
        if min(self.blocks) < 1 or sum(self.blocks) != layers:
            raise ValueError(
                f"expected block_sizes of 1 or more that sum to the {layers} layers with a router, "
                f"found {self.block_sizes}"
            )

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.block_sizes or (len(self.shape.moe_layers),)


@dataclass(frozen=True)
class EngineSpec:
    """Everything that a rollout engine needs to start."""

    model_path: str
    rollout: RolloutConfig
    max_prompt_tokens: int
    seed: int
    device: Literal["cpu", "cuda"]
    capture: RouteCapture | None  # None: the engine returns no routes
    trust_remote_code: bool = False
    quantization: dict[str, Any] | None = None
    """``quantization_config`` of the weights as the engine holds them; None: not quantised."""
    sleeps: bool = False
    """Whether the engine can sleep, which frees its GPU memory."""
    interface: str | None = None
    """See ``cluster.interface``."""

    @property
    def seeded(self) -> bool:
        """Whether every request has a seed of its own."""
        asked = self.rollout.seeded
        return asked if asked is not None else self.device == "cpu" or self.rollout.deterministic

    @property
    def max_model_len(self) -> int:
        return self.max_prompt_tokens + self.rollout.max_response_tokens


def environment(spec: EngineSpec) -> dict[str, str]:
    """Variables the engine process needs before vLLM is imported there."""
    env = {
        "HF_HUB_OFFLINE": "1",  # models are local folders
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    }
    if spec.device == "cpu":
        # All cores, since training and generation alternate. Ray would give an actor one thread.
        threads = max(1, len(os.sched_getaffinity(0)) // spec.rollout.num_engines)
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton
            "VLLM_CPU_KVCACHE_SPACE": str(spec.rollout.kv_cache_gib),
            # Binding threads to cores made the first call seven times slower on 2 cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if spec.rollout.tensor_parallel == 1:
            # vLLM then runs the worker inside the engine process.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    elif find_spec("flashinfer") is None:
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return env


def engine_args(spec: EngineSpec, known: Collection[str], *, has_fp32_head: bool) -> dict[str, Any]:
    """Arguments for ``AsyncEngineArgs``, whose field names are ``known``.

    Args:
        has_fp32_head: whether the installed vLLM honours ``head_dtype`` when it generates

    Raises:
        ValueError: on a ``rollout.engine_args`` key the installed vLLM does not have, or when it
            can neither return routes nor run the head in fp32 though asked to.
    """
    rollout = spec.rollout
    _check_options(spec, known, has_fp32_head=has_fp32_head)
    args: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": rollout.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": rollout.tensor_parallel,
        "trust_remote_code": spec.trust_remote_code,
        "enforce_eager": (
            spec.device == "cpu" if rollout.enforce_eager is None else rollout.enforce_eager
        ),
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled
        "generation_config": "vllm",  # the folder's sampling defaults change nothing
        "disable_log_stats": True,
    }
    if spec.capture is not None:
        args["enable_return_routed_experts"] = True
    overrides: dict[str, Any] = {}
    if rollout.head != "params" and has_fp32_head:
        overrides["head_dtype"] = "float32"
    if folder_config(spec.model_path).get("quantization_config") != spec.quantization:
        args["load_format"] = LOAD_FORMAT
        overrides["quantization_config"] = spec.quantization
    if spec.device == "cpu":
        # vLLM rewinds the generator of a seeded request after each part of a prompt, by a call that
        # CPU generators do not have: the engine dies. So a prompt is never cut into parts.
        args["enable_chunked_prefill"] = False
    else:
        args["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    if spec.sleeps:
        args["enable_sleep_mode"] = True
    if rollout.expert_parallel:
        args["enable_expert_parallel"] = True
    if rollout.tensor_parallel > 1:
        args["distributed_executor_backend"] = "mp"  # inside a Ray actor vLLM would pick Ray
    return args | rollout.engine_args | {"hf_overrides": overrides}


def _check_options(spec: EngineSpec, known: Collection[str], *, has_fp32_head: bool) -> None:
    """Raise what `engine_args` documents."""
    rollout = spec.rollout
    for name in rollout.engine_args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see vllm.AsyncEngineArgs"
            raise ValueError(
                f"rollout.engine_args.{name}: the installed vLLM has no such option; {hint}"
                " [RL1013]"
            )
    if spec.capture is not None and "enable_return_routed_experts" not in known:
        raise ValueError(
            "the installed vLLM has no enable_return_routed_experts: routing_replay.mode=r3 "
            f"and routing_replay.capture=true need vllm>={OLDEST_VLLM}"
            " [RL4005]"
        )
    if rollout.head == "fp32" and not has_fp32_head:
        raise ValueError(
            "rollout.head=fp32: the installed vLLM ignores head_dtype when it generates. Install a "
            "newer one, or set rollout.head=auto"
            " [RL4005]"
        )
    if spec.device == "cpu" and rollout.engine_args.get("enable_chunked_prefill"):
        raise ValueError(
            "rollout.engine_args.enable_chunked_prefill=true: on CPU vLLM cannot cut the "
            "prompts of seeded requests, and every request is seeded; leave it out"
            " [RL1013]"
        )


def scheduler_args(spec: EngineSpec, version: str) -> dict[str, Any]:
    """For ``AsyncEngineArgs`` of an engine that captures routes, ends responses at strings or gets
    weights while it generates; none for a vLLM whose scheduler `rltrain.rollout.route_scheduler`
    was not read against: it sends routes token by token.

    Raises:
        ValueError: that vLLM is to end responses at strings, or to get weights in flight.
    """
    is_known = Version(version).base_version in SpecifierSet(ROUTE_SCHEDULER_VERSIONS)
    if spec.rollout.stop and not is_known:
        raise ValueError(
            f"rollout.stop={spec.rollout.stop}: stop strings need vllm{ROUTE_SCHEDULER_VERSIONS}, "
            f"found {version}, which would end responses without their routes: install another, or "
            "use rollout.stop_token_ids"
            " [RL3006]"
        )
    if spec.rollout.update_in_flight and not is_known:
        raise ValueError(
            f"rollout.update_in_flight=true needs vllm{ROUTE_SCHEDULER_VERSIONS}, found {version}, "
            "which does not say which weights sampled a token: install another, or use false"
            " [RL4005]"
        )
    if spec.rollout.update_in_flight:
        return {"scheduler_cls": UPDATED_SCHEDULER}
    needed = spec.capture is not None or spec.rollout.stop
    return {"scheduler_cls": ROUTE_SCHEDULER} if needed and is_known else {}


def check_version(version: str) -> None:
    """Raise ValueError when this vLLM's routes or weight transfer are known to be wrong."""
    release, oldest = ([int(n) for n in v.split(".")[:2]] for v in (version, OLDEST_VLLM))
    if release < oldest:
        raise ValueError(
            f"expected vllm>={OLDEST_VLLM}, found {version}: older versions "
            "lose or mix up routed experts and have no weight transfer API. Install a newer vLLM"
            " [RL4005]"
        )


def folder_config(model_path: str, name: str = "config.json") -> dict[str, Any]:
    """A JSON file of the model folder; empty where there is none."""
    file = Path(model_path).expanduser() / name
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def stop_token_ids(model_path: str, extra: Collection[int] = ()) -> list[int]:
    """The end-of-sequence ids the model folder names, and ``extra``.

    vLLM itself stops at the tokenizer's; with ``generation_config="vllm"`` it does not read these.

    Raises:
        ValueError: the model's vocabulary has no such id, and vLLM would refuse every request.
    """
    vocab_size = folder_config(model_path, "config.json").get("vocab_size")
    if extra and vocab_size is not None and max(extra) >= vocab_size:
        raise ValueError(
            f"rollout.stop_token_ids={list(extra)}: expected ids below vocab_size={vocab_size} of "
            f"{Path(model_path) / 'config.json'}"
            " [RL3006]"
        )
    for name in ("generation_config.json", "config.json"):
        if (ids := folder_config(model_path, name).get("eos_token_id")) is not None:
            end_ids = [ids] if isinstance(ids, int) else sorted(ids)
            if vocab_size is not None and any(not 0 <= i < vocab_size for i in end_ids):
                raise ValueError(
                    f"{Path(model_path) / name}: eos_token_id={ids}: expected ids from 0, below "
                    f"vocab_size={vocab_size} of config.json; write those of the tokenizer there"
                    " [RL3006]"
                )
            return sorted({*end_ids, *extra})
    return sorted(set(extra))
