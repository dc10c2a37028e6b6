"""vLLM's scheduler, which reads and sends a response's routes once and not token by token.

By itself it takes every token's routes out of a step's, in an array of their own, and hands them on
with that token: hundreds are cut, encoded, sent and decoded in every step of the engine, though
they are read when a response has ended. And to read the routes of a prompt once, it lists all KV
blocks of all requests in each step. All that is work of the thread that launches the GPU's, too.

vLLM keeps routes by KV slot, too, so they are there when a response ends, but for those of a
request that was preempted: it loses its slots, and what it is computed again with later is not what
its tokens were sampled with.

An engine's process makes its scheduler by `route_scheduler`, named in ``scheduler_cls``, an option
of vLLM's whose interface may change; `rltrain.rollout.launch` says which versions this was read
against.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rltrain.rollout.stop_scheduler import with_stop_strings

ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def route_scheduler(*, vllm_config: Any, **arguments: Any) -> Scheduler:
    """The scheduler of an engine that captures routes or ends responses at strings."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    if vllm_config.model_config.enable_return_routed_experts:
        kind = _sending_once(kind)
    found: Scheduler = with_stop_strings(kind)(vllm_config=vllm_config, **arguments)
    return found


def _sending_once(kind: Any) -> Any:
    class RouteScheduler(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.enable_return_routed_experts = False  # vLLM's own way, token by token
            # By request. Arrays are [tokens, layers, experts per token], from the first token on.
            self.ended_routes: dict[str, NDArray[Any]] = {}  # of responses that end in this step
            self.kept_routes: dict[str, NDArray[Any]] = {}  # of those that lost their slots
            self.lost_slots: dict[str, tuple[list[int], int]] = {}  # while their last step runs

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            """As vLLM's; only a request's last output has routes, and it has them all."""
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
                # Until that step's routes are stored: those who take the slots store theirs later.
                self.lost_slots[request.request_id] = lost
            else:
                self.kept_routes[request.request_id] = self._rows(request.request_id, *lost)
                self._forget_unsampled(request)
            return super()._preempt_request(request, *args, **kwargs)

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            name = request.request_id
            if request.status in ENDED:
                count = request.num_tokens - 1  # nothing has read the last token
                self.ended_routes[name] = self._rows(name, self._blocks(name), count)[:count]
            self.kept_routes.pop(name, None)
            self.lost_slots.pop(name, None)
            return super()._free_request(request, *args, **kwargs)

        def _blocks(self, name: str) -> list[int]:
            blocks = self.kv_cache_manager.get_blocks(name).get_block_ids()
            found: list[int] = blocks[self.routed_experts_mgr.attn_gid]
            return found

        def _rows(self, name: str, blocks: list[int], tokens: int) -> NDArray[Any]:
            """A request's routes up to ``tokens``: what is kept, the rest from its ``blocks``."""
            kept = self.kept_routes.get(name)
            start = 0 if kept is None else len(kept)
            rows = self.routed_experts_mgr.get(blocks, tokens, token_start=start)
            return rows if kept is None else np.concatenate((kept, rows))

        def _forget_unsampled(self, request: Any) -> None:
            """Of a preempted request, what no token it has was sampled with: that will be computed
            again."""
            tokens = request.num_tokens - 1 if request.num_output_tokens else 0
            self.kept_routes[request.request_id] = self.kept_routes[request.request_id][:tokens]

    return RouteScheduler
