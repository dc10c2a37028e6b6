"""A subclass of vLLM's scheduler that sends a response's routes once instead of token by token.

vLLM's scheduler cuts the routes of every token out of a step's routes and sends them with the
token. So it cuts, encodes, sends and decodes hundreds of arrays per engine step, although they are
read only when a response has ended. It also lists all KV blocks of all requests in every step to
read a prompt's routes once. The thread that does this also launches the GPU's work.

vLLM keeps routes by KV slot as well, so they are available when a response ends. A preempted
request is the exception: it loses its slots, and the routes of its later recomputation are not
those that its tokens were sampled with. So its routes are kept when it is preempted.

The request of a later turn has the whole conversation as its prompt, and gets the routes from its
`FIRST_ROW` on: the turns before have the others.

The engine process creates its scheduler with `route_scheduler`, named in ``scheduler_cls``. The
interface of that vLLM option may change; `rltrain.rollout.launch` names the versions that this was
read against.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rltrain.rollout.completion import FIRST_ROW
from rltrain.rollout.stop_scheduler import with_stop_strings
from rltrain.rollout.update_scheduler import with_weight_updates

ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class RouteScheduler(Scheduler):  # type: ignore[misc]
    """For an engine that captures routes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_return_routed_experts = False  # vLLM's own way, token by token
        # By request. Arrays are [tokens, layers, experts per token], from the first token on.
        self.ended_routes: dict[str, NDArray[Any]] = {}  # of responses that end in this step
        self.kept_routes: dict[str, NDArray[Any]] = {}  # of those that lost their slots
        self.lost_slots: dict[str, tuple[list[int], int]] = {}  # while their last step runs

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Like vLLM's, but only a request's last output has routes, and it has all of them."""
        routes = model_runner_output.routed_experts
        if routes is not None:
            self.routed_experts_mgr.store_batch(routes.routing_data, routes.slot_mapping)
            model_runner_output.routed_experts = None
        arrived = self.lost_slots.keys() & scheduler_output.num_scheduled_tokens.keys()
        for name in arrived:
            self.kept_routes[name] = self._rows(name, *self.lost_slots.pop(name))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name in arrived & self.requests.keys():
            self._forget_unsampled(self.requests[name])
        if self.ended_routes:
            for to_client in outputs.values():
                for output in to_client.outputs:
                    output.routed_experts = self.ended_routes.pop(output.request_id, None)
        return outputs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        lost = self._blocks(request.request_id), request.num_computed_tokens
        if request.num_in_flight_tokens:
            # Its slots are valid until that step's routes are stored; others write them later.
            self.lost_slots[request.request_id] = lost
        else:
            self.kept_routes[request.request_id] = self._rows(request.request_id, *lost)
            self._forget_unsampled(request)
        return super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.request_id
        if request.status in ENDED:
            count = request.num_tokens - 1  # nothing has read the last token
            first = (request.sampling_params.extra_args or {}).get(FIRST_ROW, 0)
            self.ended_routes[name] = self._rows(name, self._blocks(name), count)[first:count]
        self.kept_routes.pop(name, None)
        self.lost_slots.pop(name, None)
        return super()._free_request(request, *args, **kwargs)

    def _blocks(self, name: str) -> list[int]:
        blocks = self.kv_cache_manager.get_blocks(name).get_block_ids()
        in_group: list[int] = blocks[self.routed_experts_mgr.attn_gid]
        return in_group

    def _rows(self, name: str, blocks: list[int], tokens: int) -> NDArray[Any]:
        """A request's routes up to ``tokens``: kept ones, then those of ``blocks``."""
        kept = self.kept_routes.get(name)
        start = 0 if kept is None else len(kept)
        rows = self.routed_experts_mgr.get(blocks, tokens, token_start=start)
        return rows if kept is None else np.concatenate((kept, rows))

    def _forget_unsampled(self, request: Any) -> None:
        """Drop kept routes that no sampled token of a preempted request depends on: they will
        be computed again."""
        tokens = request.num_tokens - 1 if request.num_output_tokens else 0
        self.kept_routes[request.request_id] = self.kept_routes[request.request_id][:tokens]


class AsyncRouteScheduler(RouteScheduler, AsyncScheduler):  # type: ignore[misc]
    """For an engine that captures routes and schedules a step while the last one runs."""


def route_scheduler(*, vllm_config: Any, **arguments: Any) -> Scheduler:
    """The scheduler of an engine that captures routes or ends responses at strings."""
    scheduler: Scheduler = _kind(vllm_config)(vllm_config=vllm_config, **arguments)
    return scheduler


def updated_in_flight(*, vllm_config: Any, **arguments: Any) -> Scheduler:
    """The same of an engine that gets weights while it generates."""
    kind = with_weight_updates(_kind(vllm_config))
    scheduler: Scheduler = kind(vllm_config=vllm_config, **arguments)
    return scheduler


def _kind(vllm_config: Any) -> Any:
    is_async = vllm_config.scheduler_config.async_scheduling
    if vllm_config.model_config.enable_return_routed_experts:
        return with_stop_strings(AsyncRouteScheduler if is_async else RouteScheduler)
    return with_stop_strings(AsyncScheduler if is_async else Scheduler)
