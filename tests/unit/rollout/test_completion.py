"""What is read from vLLM's completions, on its own data classes."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from rltrain.config.errors import OTHER_SAMPLING
from rltrain.rollout.completion import (
    check_length,
    check_prompt_tokens,
    sampled_logprobs,
    vllm_params,
    weight_spans,
)
from rltrain.rollout.requests import Request, SamplingParams

REQUEST = Request((5, 6, 7), seed=11, prompt_id="abc", sample_index=2)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=4)


def completion(tokens: list[int], logprobs: dict[int, float]) -> CompletionOutput:
    flat = FlatLogprobs()
    for token, logprob in logprobs.items():
        flat.append({token: Logprob(logprob)})
    return CompletionOutput(0, "", tokens, None, flat)


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    assert sampled_logprobs(REQUEST, completion([3, 4], {3: -0.5, 4: -2.0})) == (-0.5, -2.0)
    for other in ({3: -0.5, 5: -2.0}, {3: -0.5}, {4: -2.0, 3: -0.5}):
        with pytest.raises(ValueError, match="prompt abc sample 2: expected log-prob"):
            sampled_logprobs(REQUEST, completion([3, 4], other))


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, None, -1e300])
def test_a_logprob_that_is_not_finite_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match="prompt abc sample 2, response token 1"):
        sampled_logprobs(REQUEST, completion([3, 4], {3: -0.5, 4: value}))


def test_sampling_is_passed_on() -> None:
    params = vllm_params(REQUEST, SAMPLING, [9])
    assert (params.temperature, params.max_tokens, params.seed) == (0.7, 4, 11)
    assert (params.top_p, params.top_k, params.min_p, params.n) == (1.0, 0, 0.0, 1)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.0, 0.0, 1.0)
    assert params.min_tokens == 0 and not params.ignore_eos
    for shaping in ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"):
        assert not getattr(params, shaping)
    assert all(hasattr(params, name) for name in OTHER_SAMPLING)  # a misspelt one refuses nothing
    assert params.logprobs == 0 and params.stop_token_ids == [9]
    assert params.output_kind == RequestOutputKind.FINAL_ONLY  # with rows and tokens of one piece
    greedy = vllm_params(REQUEST, replace(SAMPLING, greedy=True, logprobs=False), [9])
    assert greedy.temperature == 0 and greedy.logprobs is None
    assert vllm_params(REQUEST, SAMPLING, [9], seeded=False).seed is None


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.temperature=0\.001"):
        vllm_params(REQUEST, replace(SAMPLING, temperature=0.001), [])


def test_prompt_and_response_must_fit() -> None:
    check_length(REQUEST, SAMPLING, max_model_len=7)
    with pytest.raises(ValueError, match="prompt of 1 to 2 tokens"):
        check_length(REQUEST, SAMPLING, max_model_len=6)
    with pytest.raises(ValueError, match="found 0"):
        check_length(replace(REQUEST, prompt_tokens=()), SAMPLING, max_model_len=6)


@pytest.mark.parametrize("token", [-1, 8, 2**40])
def test_a_prompt_of_another_tokenizer_is_named(token: int) -> None:
    check_prompt_tokens(REQUEST, vocab_size=8)
    answer = rf"prompt abc sample 2: token 1 has id {token}, and the model's embedding has 8 rows"
    with pytest.raises(ValueError, match=answer):
        check_prompt_tokens(replace(REQUEST, prompt_tokens=(7, token, 3)), vocab_size=8)


@given(st.lists(st.sampled_from(["update", "token"])), st.lists(st.just("update")), st.data())
def test_spans_say_which_weights_sampled_every_token(
    life: list[str], before: list[str], data: st.DataObject
) -> None:
    """A model of the engine's life: updates before the request, then tokens and updates."""
    versions, counts, sampled = [data.draw(st.integers(0, 3))], list[int](), list[int]()
    for event in [*before, "request", *life, "token"]:
        if event == "update":
            versions.append(versions[-1] + data.draw(st.integers(0, 1)))  # or the same once more
            counts.append(len(sampled))
        elif event == "request":
            counts.clear()
        else:
            sampled.append(versions[-1])
    updates = [len(versions) - 1, *counts]
    later = [*versions, 99]  # one that came when the response had ended
    spans = weight_spans(updates, later)
    ends = [*(begin for begin, _ in spans[1:]), len(sampled)]
    found = [v for (begin, v), end in zip(spans, ends, strict=True) for _ in range(begin, end)]
    assert found == sampled
    assert spans[0][0] == 0 and all(
        begin < end for (begin, _), end in zip(spans, ends, strict=True)
    )
