"""A scheduler of vLLM that says how many tokens a response had at each weight update.

During an update in flight vLLM is paused and keeps its requests. They go on with the new weights: a
token is sampled by the weights of the forward pass that reads the token before it. What was read
before keeps its routes, and the KV cache of its own weights unless that is cleared while vLLM is
paused, which preempts all requests.

Only the scheduler knows how many tokens a request had when it was paused. It sends that with the
request's last output, in ``kv_transfer_params``, which nothing else uses here.
"""

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from rltrain.rollout.completion import UPDATES


def with_weight_updates(kind: Any) -> Any:
    """The scheduler ``kind`` that counts updates, and the tokens of its requests at each."""

    class UpdatingScheduler(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.num_updates = 0
            self.tokens_at_updates: dict[str, list[int]] = {}  # by request, if it lived through any

        def set_pause_state(self, pause_state: PauseState) -> None:
            ends = self.pause_state == PauseState.PAUSED_ALL != pause_state
            super().set_pause_state(pause_state)
            if ends:
                self.num_updates += 1
                for name, request in self.requests.items():
                    self.tokens_at_updates.setdefault(name, []).append(request.num_output_tokens)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if self.num_updates:
                for output in (one for each in outputs.values() for one in each.outputs):
                    if output.finish_reason is not None:
                        counts = self.tokens_at_updates.pop(output.request_id, [])
                        output.kv_transfer_params = {UPDATES: [self.num_updates, *counts]}
            return outputs

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.status == RequestStatus.FINISHED_ABORTED:
                self.tokens_at_updates.pop(request.request_id, None)
            return super()._free_request(request, *args, **kwargs)

    return UpdatingScheduler
