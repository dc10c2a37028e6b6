"""The turns of a conversation as one sample: every token once, with the routes of the pass that
read it first. Pure.

A turn is a request whose prompt is the conversation so far, token by token, so that nothing is
tokenized again. Its engine finds most of that in its prefix cache. The last token of a turn was
read by no pass yet: its row of routes comes with the next turn, as do the rows of what the
environment said. Rows that a turn has are never replaced by those of a later one, which may have
computed them again.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rltrain.data.increments import first_difference
from rltrain.rollout.requests import Request, Rollout


def next_turn(request: Request, rollout: Rollout, observation: Sequence[int], seed: int) -> Request:
    """The request of the next turn, after the response to ``request`` and what the environment
    said to it.

    Args:
        observation: tokens behind the response, with the header of the next one
    """
    tokens = (*rollout.prompt_tokens, *rollout.response_tokens)
    assert rollout.prompt_tokens == request.prompt_tokens, "the response to another request"
    return replace(
        request,
        prompt_tokens=(*tokens, *observation),
        seed=seed,
        turn=request.turn + 1,
        first_row=len(tokens) - 1,
    )


def join_turns(turns: Sequence[Rollout]) -> Rollout:
    """One sample of the turns of a conversation, in order.

    Raises:
        ValueError: a turn does not begin with the tokens of the turns before it.
    """
    first, last = turns[0], turns[-1]
    start = len(first.prompt_tokens)
    observations = []
    for number, (one, two) in enumerate(pairwise(turns), start=1):
        tokens = (*one.prompt_tokens, *one.response_tokens)
        if two.prompt_tokens[: len(tokens)] != tokens:
            raise ValueError(
                f"turn {number}: expected a prompt that begins with the {len(tokens)} tokens of "
                "the turns before, found other tokens from "
                f"{first_difference(tokens, two.prompt_tokens)} on"
            )
        observations.append((len(tokens) - start, len(two.prompt_tokens) - start))
    routes = tuple(ref for turn in turns for ref in turn.routes)
    return replace(
        last,
        prompt_tokens=first.prompt_tokens,
        response_tokens=(*last.prompt_tokens, *last.response_tokens)[start:],
        logprobs=_logprobs(turns, observations),
        routes=routes,
        weight_spans=_weight_spans(turns),
        observations=tuple((begin, end) for begin, end in observations if end > begin),
    )


def _logprobs(
    turns: Sequence[Rollout], observations: Sequence[tuple[int, int]]
) -> tuple[float, ...] | None:
    found: list[float] = []
    for turn, (begin, end) in zip(turns, [(0, 0), *observations], strict=True):
        if turn.logprobs is None:
            return None
        found += [0.0] * (end - begin)
        found += turn.logprobs
    return tuple(found)


def _weight_spans(turns: Sequence[Rollout]) -> tuple[tuple[int, int], ...]:
    """An observation is as old as the response after it, whose weights read it."""
    start = len(turns[0].prompt_tokens)
    spans: list[tuple[int, int]] = []
    seen = start  # tokens of the turns before
    for turn in turns:
        own = len(turn.prompt_tokens)
        for n, (begin, version) in enumerate(turn.weight_spans or ((0, turn.weight_version),)):
            at = own + begin if n else seen
            if not spans or spans[-1][1] != version:
                spans.append((at - start, version))
        seen = own + len(turn.response_tokens)
    return tuple(spans) if len(spans) > 1 else ()
