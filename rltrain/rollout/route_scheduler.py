"""vLLM's scheduler, which sends a response's routes once and not token by token.

By itself it hands on every token's routes with that token, as an array of their own: hundreds are
encoded, sent and decoded in every step of the engine, though they are read when a response has
ended. And to read the routes of a prompt once, it lists all KV blocks of all requests in each step.

An engine's process makes its scheduler by `route_scheduler`, named in ``scheduler_cls``, an option
of vLLM's whose interface may change; `rltrain.rollout.launch` says which versions this was read
against.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


def route_scheduler(*, vllm_config: Any, **arguments: Any) -> Scheduler:
    """The scheduler of an engine that captures routes."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    found: Scheduler = _sending_once(kind)(vllm_config=vllm_config, **arguments)
    return found


def _sending_once(kind: Any) -> Any:
    class RouteScheduler(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.held_routes: dict[str, list[NDArray[Any]]] = {}  # by request, in order

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            """As vLLM's; only a request's last output has routes, and it has them all."""
            found = super().update_from_output(scheduler_output, model_runner_output)
            for to_client in found.values():
                for output in to_client.outputs:
                    _hold(self.held_routes, output)
            for aborted in self.held_routes.keys() - self.requests.keys():
                del self.held_routes[aborted]
            return found

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            """As vLLM's, but it notes the blocks of those requests alone that have no token yet."""
            self.enable_return_routed_experts = False
            try:
                super()._update_after_schedule(scheduler_output)
            finally:
                self.enable_return_routed_experts = True
            group = self.routed_experts_mgr.attn_gid
            for name in scheduler_output.num_scheduled_tokens:
                if self.requests[name].num_output_tokens == 0:
                    blocks = self.kv_cache_manager.get_blocks(name).get_block_ids()
                    self._re_block_ids[name] = blocks[group]

    return RouteScheduler


def _hold(held: dict[str, list[NDArray[Any]]], output: Any) -> None:
    if output.routed_experts is not None:
        # A copy: a view would keep alive the routes of all requests of its step.
        held.setdefault(output.request_id, []).append(output.routed_experts.copy())
    parts = held.pop(output.request_id, None) if output.finished else None
    output.routed_experts = None if parts is None else np.concatenate(parts)
