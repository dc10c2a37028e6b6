"""What an engine sends: routes and completions, as the trainer's side receives them."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rltrain.rollout.completion import sampled_logprobs
from rltrain.rollout.generator import build_batch
from rltrain.rollout.requests import Request, Rollout
from rltrain.routing.integrity import check_routes
from tests.unit.routing.test_fuzz import SHAPES, SPOILS, at_the_router, honest, lost_rows

NAMES = ["sample 0;"]


def make_routes(_: Path) -> Callable[[random.Random], str]:
    """Refused by name, or with a fall-back that leaves no malformed row to a router."""

    def try_one(dice: random.Random) -> str:
        rng = np.random.default_rng(dice.randrange(2**63))
        shape, spoil, rows = dice.choice(SHAPES), dice.choice(SPOILS), dice.randrange(30, 45)
        payload, rows_lost = spoil(honest(rng, shape, rows), rng, shape)
        if dice.random() < 0.05:
            payload, rows_lost = honest(rng, shape, rows), slice(0, 0)
        lost = set(lost_rows(rows_lost, rows).tolist())
        tokens = [list(range(rows + 1))]
        try:
            check_routes([payload], tokens, shape, NAMES, "fuzz")
        except ValueError as error:
            assert "fuzz, sample 0" in str(error) and lost
        else:
            assert not lost, f"{spoil.__name__} was not seen"
            return "taken"
        (ids, missing) = at_the_router(
            check_routes([payload], tokens, shape, NAMES, "fuzz", "live"), shape
        )[0]
        assert missing == lost
        assert ids.min() >= 0 and ids.max() < shape.num_experts
        assert (np.diff(np.sort(ids, axis=2), axis=2) > 0).all(), "an expert chosen twice"
        return "refused"

    return try_one


def make_completions(_: Path) -> Callable[[random.Random], str]:
    """A response makes a batch with its own tokens and log-probabilities, or is refused."""

    def try_one(dice: random.Random) -> str:
        tokens = [dice.randrange(272) for _ in range(dice.randrange(1, 9))]
        logprobs: list[Any] = [-dice.random() * 9 for _ in tokens]
        of, reason = list(tokens), dice.choice(["stop", "length"])
        for _ in range(dice.choice([0, 1, 1, 2])):
            spoil_completion(dice, tokens, of, logprobs)
        flat = SimpleNamespace(token_ids=of, logprobs=logprobs)
        completion = SimpleNamespace(token_ids=tokens, logprobs=flat)
        try:
            found = sampled_logprobs(Request((1, 2), 0, "p", 3), completion)
            rollout = Rollout((1, 2), tuple(tokens), found, reason, 0, None)
            batch = build_batch([rollout] * 2, 2)
        except ValueError:
            return "refused"
        assert tokens == of and len(logprobs) == len(tokens)
        assert all(map(math.isfinite, found))
        assert batch.tokens.tolist() == [1, 2, *tokens] * 2
        assert batch.rollout_logprobs is not None
        expected = np.float32([0, 0, *logprobs] * 2).tolist()
        assert batch.rollout_logprobs.tolist() == expected
        return "taken"

    return try_one


def spoil_completion(
    dice: random.Random, tokens: list[int], of: list[int], logprobs: list[Any]
) -> None:
    kind = dice.randrange(6)
    which: list[Any] = dice.choice([tokens, of, logprobs])
    if kind == 0 and which:
        which.pop(dice.randrange(len(which)))
    elif kind == 1:
        which.append(dice.choice([0, -1.0]))
    elif kind == 2 and logprobs:
        logprobs[dice.randrange(len(logprobs))] = dice.choice([math.nan, math.inf, -math.inf])
    elif kind == 3:
        dice.shuffle(which)
    elif kind == 4 and which:
        which[dice.randrange(len(which))] = dice.choice([-1, 2**31, 10**6])
    elif logprobs:
        logprobs[dice.randrange(len(logprobs))] = dice.choice([None, 1e308, -1e308])
