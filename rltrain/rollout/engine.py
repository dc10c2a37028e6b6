"""The Ray actor that hosts one vLLM engine.

vLLM is imported inside the methods only: it reads its environment when imported, and the controller
imports this module without paying for vLLM.
"""

import asyncio
import dataclasses
import logging
import os
import re
import uuid
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any, Literal, TypeVar

import ray

from rltrain.actors.failures import child_failure
from rltrain.actors.network import use_network
from rltrain.actors.process_start import begin_process
from rltrain.batch import SampleRoutes
from rltrain.rollout.completion import (
    UPDATES,
    check_length,
    check_prompt_tokens,
    sampled_logprobs,
    stop_string,
    vllm_params,
    weight_spans,
)
from rltrain.rollout.launch import (
    EngineSpec,
    check_version,
    engine_args,
    environment,
    folder_config,
    scheduler_args,
    stop_token_ids,
)
from rltrain.rollout.requests import Request, Rollout, SamplingParams
from rltrain.rollout.route_store import store_routes
from rltrain.routing.integrity import check_routes
from rltrain.weights.sync.links import EngineLinks
from rltrain.weights.sync.stream import Bucket

logger = logging.getLogger(__name__)

T = TypeVar("T")


def has_fp32_head() -> bool:
    """Whether the installed vLLM honours ``head_dtype`` when it generates.

    Older ones have the option, for pooling models, and ignore it for others without a word.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return "head_dtype" in LogitsProcessor.__init__.__code__.co_names


class RolloutEngine:
    """Generates responses, with log-probabilities and routes.

    Create it with ``start_engine``. Calls to ``generate`` run side by side or, with
    ``rollout.deterministic``, one after the other. One made while weights are being replaced is an
    error, or waits with ``rollout.update_in_flight``. Every method raises ChildDied when the engine
    process is dead.
    """

    def __init__(self, spec: EngineSpec) -> None:
        begin_process()
        self._spec = spec
        self._versions = [0]  # of the weights; the last is in use
        self._syncing = False
        self._turn = asyncio.Lock() if spec.rollout.deterministic else nullcontext()
        self._in_flight: dict[str, list[str]] = {}  # by call, vLLM's names of its requests
        self._aborted: set[str] = set()  # calls

    async def start(self) -> dict[str, Any]:
        """Load the model; return ``capabilities()``.

        Raises:
            ValueError: when the installed vLLM cannot do what is asked.
            ChildDied: the engine process died, with its own error.
        """
        os.environ.update(environment(self._spec))
        use_network(self._spec.interface)
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from rltrain.weights.sync import receiver

        check_version(vllm.__version__)
        self._source = f"vLLM {vllm.__version__}"
        self._process = f"the {self._source} engine process"
        known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
        chosen = scheduler_args(self._spec, vllm.__version__)
        chosen |= engine_args(self._spec, known, has_fp32_head=has_fp32_head())
        self._overrides = chosen["hf_overrides"]
        args = AsyncEngineArgs(**chosen, **receiver.receiver_args())
        more = self._spec.rollout.stop_token_ids
        self._stop_token_ids = stop_token_ids(self._spec.model_path, more)
        self._vocab_size = int(folder_config(self._spec.model_path)["vocab_size"])
        # By this vLLM chooses how much a GPU runs at once: 128 requests, or a batch's 1,024.
        offline = self._spec.device == "cuda"
        context = UsageContext.LLM_CLASS if offline else UsageContext.ENGINE_CONTEXT
        try:
            self._engine = AsyncLLM.from_engine_args(args, usage_context=context)
        except RuntimeError as error:
            if (codes := failed_processes(str(error))) is None:
                raise
            raise child_failure(f"{self._process} died while loading the model", codes) from error
        return self.capabilities()

    def capabilities(self) -> dict[str, Any]:
        return {
            "vllm": self._source.removeprefix("vLLM "),
            "torch": version("torch"),
            "device": self._spec.device,
            "routes": self._spec.capture is not None,
            "head": "fp32" if self._overrides.get("head_dtype") == "float32" else "params",
            "max_model_len": self._spec.max_model_len,
            "max_num_seqs": self._engine.vllm_config.scheduler_config.max_num_seqs,
            "pid": os.getpid(),
        }

    def weight_version(self) -> int:
        """Of the last weight sync; 0 before the first."""
        return self._versions[-1]

    async def devices(self) -> list[str]:
        """The GPU of every vLLM worker, by UUID; "cpu" for a CPU."""
        from rltrain.weights.sync import receiver

        return await self._unless_dead(receiver.devices(self._engine))

    async def join_senders(self, links: EngineLinks) -> list[dict[int, list[str]]]:
        """Have the vLLM workers join the policy ranks that will send weights.

        Returns:
            By worker, `rltrain.weights.sync.links.BroadcastReceiver.memory`.
        """
        from rltrain.weights.sync import receiver

        return await self._unless_dead(receiver.join_groups(self._engine, links))

    async def start_weight_sync(self) -> None:
        from rltrain.weights.sync import receiver

        in_flight = self._spec.rollout.update_in_flight
        if not in_flight and (requests := sum(map(len, self._in_flight.values()))):
            raise RuntimeError(f"{requests} requests would see two versions of the weights")
        self._syncing = True
        if in_flight:  # requests stay; those whose cache is cleared begin with a prefill again
            clears = self._spec.rollout.kv_cache_on_update == "recompute"
            await self._unless_dead(self._engine.pause_generation(mode="keep", clear_cache=clears))
        await self._unless_dead(receiver.start_sync(self._engine, in_flight=in_flight))

    async def load_weight_bucket(self, bucket: Bucket) -> None:
        from rltrain.weights.sync import receiver

        await self._unless_dead(receiver.load_bucket(self._engine, bucket))

    async def finish_weight_sync(self, version: int) -> None:
        """Put the new weights in use, and forget cached prefixes: with ``rollout.update_in_flight``
        no later request finds those of earlier weights.

        Args:
            version: of the weights; every engine has the same
        """
        from rltrain.weights.sync import receiver

        in_flight = self._spec.rollout.update_in_flight
        await self._unless_dead(receiver.finish_sync(self._engine, in_flight=in_flight))
        self._syncing = False
        self._versions.append(version)
        if in_flight:
            await self._unless_dead(self._engine.resume_generation())

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Free the GPU's memory. The KV cache is dropped. The weights are kept on the host (1), or
        dropped as well (2) where a weight sync will bring new ones.

        Raises:
            RuntimeError: requests are running; vLLM would abort them.
        """
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} requests run on an engine that is to sleep")
        await self._unless_dead(self._engine.sleep(level))

    async def wake(self, parts: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """Allocate memory for these parts again. With both, the engine can generate."""
        await self._unless_dead(self._engine.wake_up(list(parts)))

    async def digest(self) -> dict[str, str]:
        """Digest by name of every parameter and buffer, in the engine's own storage format."""
        from rltrain.weights.sync import receiver

        return await self._unless_dead(receiver.engine_digest(self._engine))

    async def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, call: str | None = None
    ) -> list[Rollout] | None:
        """One rollout per request, in their order; None when they were aborted.

        Args:
            call: a unique name for ``abort``

        Raises:
            ValueError: naming the sample, when it is too long, a token has no row of the embedding,
                a log-probability is not finite or, unless malformed rows may fall back, its routes
                are malformed.
            RuntimeError: when vLLM gave a request up.
        """
        for request in requests:
            check_length(request, sampling, self._spec.max_model_len)
            check_prompt_tokens(request, self._vocab_size)
        if self._syncing and not self._spec.rollout.update_in_flight:
            raise RuntimeError("generate was called between start and finish of a weight sync")
        call = call or uuid.uuid4().hex
        self._in_flight[call] = [f"{call}-{i}" for i in range(len(requests))]
        try:
            async with self._turn:
                outputs = await self._unless_dead(self._complete(requests, sampling, call))
                if outputs is None:
                    return None
                completions = [output.outputs[0] for output in outputs]
                spans = [self._spans(output) for output in outputs]
                routes = await self._routes(requests, completions, sampling, spans)
        finally:
            del self._in_flight[call]
            self._aborted.discard(call)
        return [
            Rollout(
                prompt_tokens=request.prompt_tokens,
                response_tokens=tuple(completion.token_ids),
                logprobs=sampled_logprobs(request, completion) if sampling.logprobs else None,
                finish_reason=completion.finish_reason,
                weight_version=of_tokens[-1][1],
                routes=route,
                stop_string=stop_string(completion),
                weight_spans=of_tokens if len(of_tokens) > 1 else (),
            )
            for request, completion, route, of_tokens in zip(
                requests, completions, routes, spans, strict=True
            )
        ]

    def _spans(self, output: Any) -> tuple[tuple[int, int], ...]:
        """Which weights sampled a response; see `weight_spans`."""
        updates = (output.kv_transfer_params or {}).get(UPDATES)
        if updates is None:
            return ((0, self._versions[-1]),)
        return weight_spans(updates, self._versions)

    async def abort(self, calls: Sequence[str]) -> None:
        """Make these calls of ``generate`` return None, also those that have not arrived yet: Ray
        may reorder calls."""
        self._aborted.update(calls)
        await self._engine.abort([n for call in calls for n in self._in_flight.get(call, ())])

    async def _complete(
        self, requests: Sequence[Request], sampling: SamplingParams, call: str
    ) -> list[Any] | None:
        """vLLM's finished outputs, in the order of the requests; None when aborted."""
        if call in self._aborted:
            return None
        names = self._in_flight[call]
        deterministic = self._spec.rollout.deterministic
        params = [
            vllm_params(request, sampling, self._stop_token_ids, seeded=self._spec.seeded)
            for request in requests
        ]
        try:
            if deterministic:
                # Which requests share a forward pass decides how sums are rounded. While paused the
                # scheduler queues, so the first pass sees every request, whenever each arrived.
                await self._engine.pause_generation(mode="wait", clear_cache=True)
            try:
                pending = [
                    await self._add(name, request, param)
                    for name, request, param in zip(names, requests, params, strict=True)
                ]
            finally:
                if deterministic:
                    await self._engine.resume_generation()
            if call in self._aborted:  # when some were not yet with vLLM
                await self._engine.abort(names)
            outputs = [await output.get() for output in pending]
        except BaseException:
            await self._engine.abort(names)
            raise
        completions = [output.outputs[0] for output in outputs]
        if call in self._aborted:
            return None
        for request, completion in zip(requests, completions, strict=True):
            if completion.finish_reason not in ("stop", "length"):
                raise RuntimeError(
                    f"{self._source}, {request}: expected finish reason stop or length, found "
                    f"{completion.finish_reason}"
                    " [RL4009]"
                )
        return outputs

    async def _add(self, name: str, request: Request, params: Any) -> Any:
        """Send one request to vLLM; returns the object that yields its output."""
        from vllm.inputs import tokens_input

        # Prefixes that were computed with other weights are not to be found.
        salt = str(len(self._versions)) if self._spec.rollout.update_in_flight else None
        prompt = tokens_input(list(request.prompt_tokens), cache_salt=salt)
        return await self._engine.add_request(name, prompt, params)

    async def _routes(
        self,
        requests: Sequence[Request],
        completions: Sequence[Any],
        sampling: SamplingParams,
        spans: Sequence[tuple[tuple[int, int], ...]],
    ) -> Sequence[SampleRoutes]:
        capture = self._spec.capture
        if capture is None or not sampling.capture_routes:
            return [()] * len(requests)
        # In a thread, so that the event loop can receive outputs meanwhile.
        routes = await asyncio.to_thread(
            check_routes,
            [completion.routed_experts for completion in completions],
            [
                [*request.prompt_tokens, *completion.token_ids]
                for request, completion in zip(requests, completions, strict=True)
            ],
            capture.shape,
            [str(request) for request in requests],
            self._source,
            capture.fallback,
            [request.first_row for request in requests],
        )
        for sample in routes:
            for fault in sample.faults:
                logger.warning("%s: routing_replay.fallback=%s", fault, capture.fallback)
        refs = await store_routes(routes, capture, self._versions[-1], self._source)
        return [
            (dataclasses.replace(ref, weight_version=of_tokens[-1][1]),)
            for ref, of_tokens in zip(refs, spans, strict=True)
        ]

    async def _unless_dead(self, call: Awaitable[T]) -> T:
        """The call's result. Once the engine process has died vLLM never answers some calls."""
        task = asyncio.ensure_future(call)
        while not task.done() and not self._engine.errored:
            await asyncio.wait({task}, timeout=1.0)
        if not self._engine.errored:
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
        raise child_failure(f"{self._process} died", exit_codes(self._engine))

    def shutdown(self) -> None:
        """Stop the engine process. The actor cannot be used afterwards."""
        self._engine.shutdown()


def failed_processes(error: str) -> dict[str, int] | None:
    """Exit codes of processes that failed at start, by name, from vLLM's error message; None if the
    error is another one."""
    if "initialization failed" not in error:
        return None
    return {name: int(code) for name, code in re.findall(r"'([^']+)': (-?\d+)", error)}


def exit_codes(engine: Any) -> dict[str, int | None]:
    """Exit codes of the engine's processes that vLLM still knows, by name."""
    manager = engine.engine_core.resources.engine_manager
    return {process.name: process.exitcode for process in getattr(manager, "processes", ())}


def start_engine(spec: EngineSpec, **options: Any) -> Any:
    """Create the actor and begin loading.

    Args:
        options: of the Ray actor

    Returns:
        (handle, reference to its capabilities): get the second to wait until it is ready.
    """
    actor = ray.remote(RolloutEngine).options(**{"num_cpus": 0, **options})
    handle = actor.remote(spec)
    return handle, handle.start.remote()
