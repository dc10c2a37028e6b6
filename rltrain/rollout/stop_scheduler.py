"""Ends a response in vLLM's scheduler, at the token that completes a stop string.

vLLM itself detects stop strings outside the engine process and then aborts the request. More tokens
may have been sampled meanwhile, and an aborted request has no routes. Here a response ends as at a
stop token: with log-probabilities and all routes, and no token after the one that completed the
string. Transformers is imported by an engine that has stop strings.
"""

from functools import cache
from typing import Any

from vllm.v1.request import RequestStatus

from rltrain.rollout.stop_strings import STOP_STRINGS, StopStrings


def with_stop_strings(kind: Any) -> Any:
    """The scheduler ``kind`` that also ends requests at their stop strings."""

    class StoppingScheduler(kind):  # type: ignore[misc]
        def _update_request_with_output(
            self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
        ) -> tuple[list[int], bool]:
            stops = (request.sampling_params.extra_args or {}).get(STOP_STRINGS)
            stop = None
            if stops:
                model = self.vllm_config.model_config
                finder = _stop_strings(model.tokenizer, model.trust_remote_code, tuple(stops))
                stop, count = finder.end(request.output_token_ids, new_token_ids)
                if stop is not None:  # several may come at once, by speculative decoding
                    new_token_ids = new_token_ids[:count]
            taken, stopped = super()._update_request_with_output(
                request, new_token_ids, *args, **kwargs
            )
            # A stop token may have ended it before.
            is_over = stopped and request.status == RequestStatus.FINISHED_STOPPED
            if stop is not None and len(taken) == count and not is_over:
                request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, stop
                stopped = True
            return taken, stopped

    return StoppingScheduler


@cache
def _stop_strings(tokenizer: str, trust_remote_code: bool, stops: tuple[str, ...]) -> StopStrings:
    from transformers import AutoTokenizer

    return StopStrings(
        AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust_remote_code), stops
    )
