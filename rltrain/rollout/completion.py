"""Converts requests to vLLM's sampling parameters, and vLLM's completions to log-probabilities.

Only an engine's process imports vLLM.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rltrain.data.vocabulary import check_ids
from rltrain.rollout.requests import Request, SamplingParams
from rltrain.rollout.stop_strings import STOP_STRINGS

FIRST_ROW = "rltrain_first_row"
"""The row of routes with which what `rltrain.rollout.route_scheduler` sends begins."""

UPDATES = "rltrain_weight_updates"
"""What `rltrain.rollout.update_scheduler` sends with a response: how many weight updates its engine
has had, and how many of its tokens were there at each that it lived through."""


def check_length(request: Request, sampling: SamplingParams, max_model_len: int) -> None:
    """ValueError when prompt and response cannot fit: vLLM would cut the response in silence."""
    needed = len(request.prompt_tokens) + sampling.max_tokens
    if not request.prompt_tokens or needed > max_model_len:
        raise ValueError(
            f"{request}: expected a prompt of 1 to {max_model_len - sampling.max_tokens} tokens, "
            f"which leaves room for {sampling.max_tokens} more, found "
            f"{len(request.prompt_tokens)}: raise data.max_prompt_tokens"
            " [RL2005]"
        )


def check_prompt_tokens(request: Request, vocab_size: int) -> None:
    """ValueError when a token of the prompt has no row of the model's embedding: vLLM would take
    one that only pads it."""
    check_ids(request.prompt_tokens, vocab_size, str(request))


def vllm_params(
    request: Request, sampling: SamplingParams, stop_token_ids: list[int], *, seeded: bool = True
) -> Any:
    """``vllm.SamplingParams`` of one request; without ``seeded`` it has no seed of its own."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    temperature = 0.0 if sampling.greedy else sampling.temperature
    params = VllmSamplingParams(
        temperature=temperature,
        max_tokens=sampling.max_tokens,
        seed=request.seed if seeded else None,
        logprobs=0 if sampling.logprobs else None,  # 0: of the sampled token alone
        flat_logprobs=sampling.logprobs,
        stop_token_ids=stop_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=_extra_args(request, sampling),
    )
    if params.temperature != temperature:
        raise ValueError(
            f"rollout.temperature={temperature}: vLLM would sample at {params.temperature} "
            "instead; use at least that"
            " [RL1013]"
        )
    return params


def _extra_args(request: Request, sampling: SamplingParams) -> dict[str, Any] | None:
    """What the schedulers of this package read."""
    extra: dict[str, Any] = {}
    if sampling.stop:
        extra[STOP_STRINGS] = list(sampling.stop)
    if request.first_row:
        extra[FIRST_ROW] = request.first_row
    return extra or None


def sampled_logprobs(request: Request, completion: Any) -> tuple[float, ...]:
    """The log-probability of every sampled token, from vLLM's finished completion."""
    flat, sampled = completion.logprobs, list(completion.token_ids)
    if list(flat.token_ids) != sampled:
        raise ValueError(
            f"{request}: expected log-probabilities of the {len(sampled)} sampled tokens "
            f"{sampled[:8]}, found those of {len(flat.token_ids)}: {list(flat.token_ids)[:8]}"
            " [RL5005]"
        )
    # As the trainer keeps them; None becomes NaN.
    with np.errstate(over="ignore"):
        bad = np.flatnonzero(~np.isfinite(np.array(flat.logprobs, np.float32)))
    if len(bad):
        raise ValueError(
            f"{request}, response token {bad[0]}: expected a finite log-probability, found "
            f"{flat.logprobs[bad[0]]}: the engine's weights or its KV cache are broken"
            " [RL5005]"
        )
    return tuple(flat.logprobs)


def stop_string(completion: Any) -> str | None:
    """The stop string that ended it; None where a stop token or the length limit did."""
    return completion.stop_reason if isinstance(completion.stop_reason, str) else None


def weight_spans(updates: Sequence[int], versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Which tokens of a response were sampled by which weights: (first token, weight version) of
    each stretch, in order.

    Args:
        updates: see `UPDATES`
        versions: of the weights that each update brought; the first is that before all updates
    """
    last, *counts = updates
    spans: list[tuple[int, int]] = []
    first = last - len(counts)
    for begin, version in zip([0, *counts], versions[first : last + 1], strict=True):
        if spans and spans[-1][0] == begin:  # no token was sampled between two updates
            spans.pop()
        spans.append((begin, version))
    return tuple(spans)
