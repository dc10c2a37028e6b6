"""Turns of conversations as samples, against the conversation that they were cut of."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.rollout.generator import build_batch
from rltrain.rollout.requests import Request, Rollout
from rltrain.rollout.turns import join_turns, next_turn
from tests.unit.rollout.test_generator import route_ref


@dataclass(frozen=True)
class Turn:
    observation: list[int]  # of the first turn: the prompt
    response: list[int]
    versions: list[int]  # of each response token


@st.composite
def conversations(draw: Any) -> list[Turn]:
    turns, version = [], draw(st.integers(0, 3))
    for number in range(draw(st.integers(1, 6))):
        observation = draw(st.lists(st.integers(0, 9), min_size=number == 0, max_size=4))
        response = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        versions = []
        for _ in response:
            version += draw(st.sampled_from([0, 0, 0, 1, 2]))
            versions.append(version)
        turns.append(Turn(observation, response, versions))
    return turns


def spans_of(versions: list[int]) -> tuple[tuple[int, int], ...]:
    spans = [(n, v) for n, v in enumerate(versions) if n == 0 or versions[n - 1] != v]
    return tuple(spans) if len(spans) > 1 else ()


def sampled(turns: list[Turn]) -> list[Rollout]:
    """What an engine answers, turn by turn, to the requests of `next_turn`."""
    request = Request(tuple(turns[0].observation), 0, "a", 0)
    rollouts: list[Rollout] = []
    for number, turn in enumerate(turns):
        if number:
            request = next_turn(request, rollouts[-1], turn.observation, seed=number)
            assert request.turn == number and request.seed == number
        rows = len(request.prompt_tokens) + len(turn.response) - 1 - request.first_row
        rollouts.append(
            Rollout(
                prompt_tokens=request.prompt_tokens,
                response_tokens=tuple(turn.response),
                logprobs=tuple(-1.0 - token for token in turn.response),
                finish_reason="stop",
                weight_version=turn.versions[-1],
                routes=(replace(route_ref(rows), first_row=request.first_row),),
                weight_spans=spans_of(turn.versions),
            )
        )
    return rollouts


@given(conversations())
def test_every_token_is_there_once_with_what_belongs_to_it(turns: list[Turn]) -> None:
    batch = build_batch([join_turns(sampled(turns))], 1)
    tokens = [t for turn in turns for t in (*turn.observation, *turn.response)]
    assert batch.tokens.tolist() == tokens
    mask = [
        s
        for turn in turns
        for s in (*[False] * len(turn.observation), *[True] * len(turn.response))
    ]
    assert batch.response_mask.tolist() == mask
    logprobs = [-1.0 - t if is_sampled else 0.0 for t, is_sampled in zip(tokens, mask, strict=True)]
    assert batch.rollout_logprobs is not None and batch.rollout_logprobs.tolist() == logprobs
    versions = [v for t in turns for v in (*[t.versions[0]] * len(t.observation), *t.versions)]
    assert batch.token_versions is not None and batch.token_versions.tolist() == versions
    # build_batch has checked that the rows of the turns follow one another: tokens - 1 in all.
    assert batch.route_mask is not None and int(batch.route_mask.sum()) == len(tokens) - 1
    assert isinstance(batch.rollout_expert_indices, tuple)
    assert len(batch.rollout_expert_indices[0]) == len(turns)


def test_one_turn_is_what_it_was() -> None:
    (rollout,) = sampled([Turn([1, 2], [3, 4], [5, 5])])
    assert join_turns([rollout]) == rollout


def test_turns_that_do_not_follow_one_another_are_refused() -> None:
    one, two = sampled([Turn([1, 2], [3, 4], [0, 0]), Turn([5], [6], [0])])
    other = replace(two, prompt_tokens=(1, 2, 3, 9, 5))
    with pytest.raises(ValueError, match=r"turn 1: expected .* the 4 tokens .* from 3 on"):
        join_turns([one, other])
    with pytest.raises(ValueError, match="found other tokens from 2 on"):
        join_turns([one, replace(two, prompt_tokens=(1, 2))])


def test_a_turn_whose_rows_are_missing_is_refused() -> None:
    one, two = sampled([Turn([1, 2], [3, 4], [0, 0]), Turn([5], [6], [0])])
    late = replace(two, routes=(replace(two.routes[0], first_row=4),))
    with pytest.raises(ValueError, match=r"tokens - 1 = 5 rows.*\(0, 3\), \(4, 2\)"):
        build_batch([join_turns([one, late])], 1)
