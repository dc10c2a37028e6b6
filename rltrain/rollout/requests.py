"""What goes into a rollout engine and what comes out."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rltrain.batch import SampleRoutes


class Prompt(Protocol):
    """The part of a ``Problem`` that generation reads."""

    @property
    def prompt_tokens(self) -> Sequence[int]: ...
    @property
    def id(self) -> str: ...


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled. Nothing else affects the sampling distribution."""

    temperature: float
    max_tokens: int
    num_samples: int = 1  # G
    greedy: bool = False
    capture_routes: bool = False  # where the engine was started to capture them
    logprobs: bool = True
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response to sample, or the response of one turn of a conversation."""

    prompt_tokens: tuple[int, ...]  # of a later turn: the conversation so far
    seed: int
    prompt_id: str
    sample_index: int
    turn: int = 0
    first_row: int = 0  # the first row of routes that is wanted: earlier turns have those before

    def __str__(self) -> str:
        turn = f" turn {self.turn}" if self.turn else ""
        return f"prompt {self.prompt_id[:12]} sample {self.sample_index}{turn}"


@dataclass(frozen=True)
class Rollout:
    """One sampled response, or the turns of a conversation (`rltrain.rollout.turns`).

    ``response_tokens`` ends with the stop token when there was one, or with the token that
    completed ``stop_string``, the one of ``rollout.stop`` that ended it. Those of a conversation
    are all behind its first prompt, with what an environment said between the responses.
    """

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # one per response token; 0 where none was sampled
    finish_reason: Literal["stop", "length"]
    weight_version: int  # of the weights that sampled its last token
    routes: SampleRoutes  # empty where none were captured
    stop_string: str | None = None
    # (first response token, weight version) of each stretch, in order; an observation belongs to
    # the response after it. Empty: all of it was sampled by `weight_version`.
    weight_spans: tuple[tuple[int, int], ...] = ()
    # Half-open ranges of response tokens that were not sampled, in order.
    observations: tuple[tuple[int, int], ...] = ()


def request_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """A seed in [0, 2**63) that depends on its arguments only, in any process on any machine."""
    key = f"{run_seed}/{step}/{sample_index}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
